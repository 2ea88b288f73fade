"""Calls of models as requests for the models that they call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from gpubridge.engine.hand_over import for_others, shared
from gpubridge.engine.instance import Instance
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.model_io import check_inputs, model_shape
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.request import InferRequest, MemoryRange, RequestOptions
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Shapes, Signature, encode_dims, encode_signature

_KEPT = 512
_START, _END = 1, 2


class _Input(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class _Form:
    """What calls of one signature ask of a model; of their shapes and sizes the last ones are kept.

    Raises
    ------
    BridgeError
        When the model has no such output.
    """

    __slots__ = (
        "_model",
        "_shapes",
        "_signature",
        "_sizes",
        "batch_size",
        "dims",
        "encoded",
        "options",
    )

    def __init__(self, signature: Signature, model: Model) -> None:
        known = model.config.outputs_by_name
        for name in signature.requested:
            if name not in known:
                raise BridgeError(
                    f"unexpected inference output '{name}' for model '{model.name}'",
                    ErrorCode.INVALID_ARG,
                )
        self._model = model
        self._signature = signature
        self._shapes: Shapes | None = None
        self._sizes: list[int] = []
        self.encoded = self.dims = b""
        self.batch_size = 1
        self.options = RequestOptions()

    def fit(self, record: Record, sizes: list[int]) -> None:
        """Take the shapes of a call, and the sizes of its inputs.

        Raises
        ------
        BridgeError
            In Triton's words, when they are not as the model's configuration wants them.
        """
        if record.shapes == self._shapes and sizes == self._sizes:
            return
        config = self._model.config
        tensors = self._signature.tensors
        inputs = [
            _Input(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(tensors, record.shapes, sizes, strict=True)
        ]
        check_inputs(record.identifier, inputs, config)
        shapes = [model_shape(entry, config) for entry in inputs]
        if not self.encoded:
            # A reshape gives an input its rank, whatever its shape is.
            described = [
                (spec.name, spec.datatype, len(shape))
                for spec, shape in zip(tensors, shapes, strict=True)
            ]
            requested = tuple(dict.fromkeys(self._signature.requested))
            self.encoded = encode_signature(described, requested)
        self.dims = encode_dims(shapes)
        self.batch_size = inputs[0].shape[0] if config.max_batch_size and inputs else 1
        self.options = RequestOptions(
            shapes=tuple(zip([entry.name for entry in inputs], shapes, strict=True))
        )
        self._shapes, self._sizes = record.shapes, sizes


class CallTarget:
    """What calls of one context are for.

    Parameters
    ----------
    said : CallContext
        What the caller says of them.
    device : str
        The UUID of the GPU on which the caller's outputs can stay; empty for none.
    caller : str
        The model that calls.

    Attributes
    ----------
    model : Model
        The model that is called.
    needed : collection of str
        The models that execute it.
    """

    __slots__ = ("_context", "_plain", "_said", "_shared", "model", "needed")

    def __init__(self, said: CallContext, model: Model, device: str, caller: str) -> None:
        if model.config.decoupled and not said.decoupled:
            raise BridgeError(_NOT_DECOUPLED.format(said.model), ErrorCode.UNSUPPORTED)
        if said.correlation_text:
            text_of_sequence(said.correlation_text)
        self.model = model
        self.needed: Collection[str] = model.executed_by
        self._said = said
        self._plain = not (said.correlation or said.timeout or said.flags)
        self._context = RequestContext(
            flags=said.flags,
            correlation_id=said.correlation_id,
            correlation_text=said.correlation_text,
            timeout=said.timeout,
            parameters=said.parameters,
            shared=said.handed_on,
            device="" if said.host_outputs else device,
            outputs_for=caller,
        )
        self._shared = shared(self._context)

    def context(self, ranges: Sequence[MemoryRange]) -> RequestContext:
        """Return what the called stub is told of a call whose inputs lie in ``ranges``."""
        return self._shared if for_others(ranges, (self.model.name,)) else self._context

    def options(self, form: _Form) -> RequestOptions:
        """Return the scheduler's options for a call of that form."""
        said = self._said
        if self._plain:
            return form.options
        return RequestOptions(
            0,
            said.timeout,
            said.correlation,
            bool(said.flags & _START),
            bool(said.flags & _END),
            form.options.shapes,
        )


class CalledModels:
    """Finds the models that are called; what that gave is remembered until models change, bounded.

    Parameters
    ----------
    repository : ModelRepository
        Where the models are.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        # Records with equal signatures or contexts mostly have the same object, which is held here: so
        # nothing else gets its address.
        self._forms: dict[tuple[int, Model], tuple[Signature, _Form]] = {}
        self._targets: dict[tuple[int, str, str], tuple[CallContext, CallTarget]] = {}
        self._versions: dict[str, list[Model]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._forms.clear()
        self._targets.clear()
        self._versions.clear()

    def target(self, said: CallContext, device: str, caller: str) -> CallTarget:
        """Return what a call of the model ``caller`` is for.

        Raises
        ------
        BridgeError
            In Triton's words, when there is no such model, or it cannot be called so.
        """
        known = self._targets.get((id(said), device, caller))
        if known is None:
            target = CallTarget(said, self._find(said.model, said.version), device, caller)
            if len(self._targets) >= _KEPT:
                self._targets.clear()
            known = self._targets[id(said), device, caller] = said, target
        return known[1]

    def request(
        self,
        target: CallTarget,
        record: Record,
        ranges: Sequence[MemoryRange],
        on_done: Callable[[Any], None],
    ) -> InferRequest:
        """Make the request of a call, whose inputs lie in ``ranges``.

        Raises
        ------
        BridgeError
            In Triton's words, when it is no valid request for the model.
        """
        signature, model = record.signature, target.model
        known = self._forms.get((id(signature), model))
        if known is None:
            if len(self._forms) >= _KEPT:
                self._forms.clear()
            known = self._forms[id(signature), model] = signature, _Form(signature, model)
        form = known[1]
        form.fit(record, [part.nbytes for part in ranges])
        request = InferRequest(
            form.encoded,
            None,
            0,
            (),
            on_done,
            record.identifier,
            target.context(ranges),
            0,
            form.batch_size,
            target.options(form),
            form.dims,
        )
        request.ranges = ranges
        return request

    def _find(self, name: str, version: int) -> Model:
        try:
            return self._repository.find(name, None if version == -1 else version)
        except BridgeError:
            raise BridgeError(
                f"Failed for execute the inference request. Model '{name}' is not ready.",
                ErrorCode.NOT_FOUND,
            ) from None

    def instances(self, name: str) -> Sequence[Instance]:
        """Return the instances of all versions of a model."""
        models = self._versions.get(name)
        if models is None:
            find = self._repository.find
            models = [find(name, version) for version in self._repository.versions(name)]
            self._versions[name] = models
        if len(models) == 1:
            return models[0].instances
        return [instance for model in models for instance in model.instances]


_NOT_DECOUPLED = (
    "Model {} is using the decoupled. The current BLS request call doesn't support models using the "
    "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
    "calls for decoupled models.'"
)
