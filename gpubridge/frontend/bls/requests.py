"""Calls of models as requests for the models that they call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from gpubridge.engine.hand_over import for_others, shared
from gpubridge.engine.instance import Instance
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.model_io import check_inputs, model_shape
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.protocol.request_form import InputForm
from gpubridge.request import InferRequest, MemoryRange, RequestOptions
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Shapes, encode_dims, encode_signature

_KEPT = 512
_START, _END = 1, 2


class CallForm:
    """What calls of one signature and context ask of a model; of shapes and sizes the last ones are kept.

    - ``record``: the first of these calls.
    - ``caller``: the model that calls.
    - ``device``: the UUID of the GPU on which the caller's outputs can stay; empty for none.

    Attribute ``needed``: the models that execute it.

    Raises BridgeError: in Triton's words, when the model cannot be called so.
    """

    def __init__(self, record: Record, model: Model, caller: str, device: str) -> None:
        said: CallContext = record.context
        if model.config.decoupled and not said.decoupled:
            raise BridgeError(_NOT_DECOUPLED.format(said.model), ErrorCode.UNSUPPORTED)
        for name in record.signature.requested:
            if name not in model.config.outputs_by_name:
                raise BridgeError(
                    f"unexpected inference output '{name}' for model '{model.name}'",
                    ErrorCode.INVALID_ARG,
                )
        if said.correlation_text:
            text_of_sequence(said.correlation_text)
        self.model = model
        self.needed: Collection[str] = model.executed_by
        self.said = said
        self.signature = record.signature
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
        self._shapes: Shapes | None = None
        self._sizes: list[int] = []
        self._encoded = self._dims = b""
        self._batch_size = 1
        self._options = RequestOptions()

    def request(
        self, record: Record, ranges: Sequence[MemoryRange], on_done: Callable[[Any], None]
    ) -> InferRequest:
        """Make the request of a call, whose inputs lie in ``ranges``.

        Raises BridgeError: in Triton's words, when its inputs are not as the model's configuration
        wants them.
        """
        sizes = [part.nbytes for part in ranges]
        if record.shapes != self._shapes or sizes != self._sizes:
            self._fit(record, sizes)
        request = InferRequest(
            self._encoded,
            None,
            0,
            (),
            on_done,
            record.identifier,
            self._shared if for_others(ranges, (self.model.name,)) else self._context,
            0,
            self._batch_size,
            self._options,
            self._dims,
        )
        request.ranges = ranges
        return request

    def _fit(self, record: Record, sizes: list[int]) -> None:
        config, said = self.model.config, self.said
        inputs = [
            InputForm(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(
                self.signature.tensors, record.shapes, sizes, strict=True
            )
        ]
        check_inputs(record.identifier, inputs, config)
        shapes = [model_shape(entry, config) for entry in inputs]
        names = [entry.name for entry in inputs]
        if not self._encoded:
            # A reshape gives an input its rank, whatever its shape is.
            tensors = [
                (each.name, each.datatype, len(shape))
                for each, shape in zip(inputs, shapes, strict=True)
            ]
            requested = tuple(dict.fromkeys(self.signature.requested))
            self._encoded = encode_signature(tensors, requested)
        self._dims = encode_dims(shapes)
        self._batch_size = inputs[0].shape[0] if config.max_batch_size and inputs else 1
        self._options = RequestOptions(
            timeout_us=said.timeout,
            correlation_id=said.correlation,
            start=bool(said.flags & _START),
            end=bool(said.flags & _END),
            shapes=tuple(zip(names, shapes, strict=True)),
        )
        self._shapes, self._sizes = record.shapes, sizes


class CalledModels:
    """Finds the models that are called; what that gave is remembered until models change, bounded."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._forms: dict[tuple[int, int, str, str], CallForm] = {}
        self._versions: dict[str, list[Model]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._forms.clear()
        self._versions.clear()

    def form(self, record: Record, caller: str, device: str) -> CallForm:
        """Return what a call of the model ``caller`` asks for.

        Raises BridgeError: in Triton's words, when there is no such model, or it cannot be called so.
        """
        # Records with equal signatures or contexts mostly have the same objects. The form holds them,
        # so that nothing else gets their addresses.
        key = id(record.signature), id(record.context), caller, device
        form = self._forms.get(key)
        if form is None:
            said: CallContext = record.context
            form = CallForm(record, self._find(said.model, said.version), caller, device)
            if len(self._forms) >= _KEPT:
                self._forms.clear()
            self._forms[key] = form
        return form

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
