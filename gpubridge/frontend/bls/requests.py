"""Calls of models as requests for the models that they call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpubridge.engine.instance import Instance
from gpubridge.engine.model import Model
from gpubridge.engine.repository import ModelRepository
from gpubridge.engine.tracing import UNTRACED, Caused
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.model_io import InputForm, check_inputs, model_shape
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.request import RequestOptions
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import encode_dims, encode_signature

_START, _END = 1, 2


class CallForm:
    """Template of calls of one signature and context.

    - ``record``: the first of these calls.
    - ``model``: that is called.
    - ``caller``: the model that calls.
    - ``device``: the UUID of the GPU on which the caller's outputs can stay; empty for none.
    - ``instances``: gives the instances of all versions of a model.

    Its attributes:

    - ``model``: as given.
    - ``submit``: takes the requests over.
    - ``home``: the name of the model.
    - ``needed``: the models that execute them.
    - ``instances``: as given.
    - ``context``, ``shared``: the context of requests; the second where others may look at the inputs, too.
    - ``decoupled``: whether the caller takes more than one response.
    - ``origin``: where requests come from; None where `cause` says it.

    Raises BridgeError: in Triton's words, when the model cannot be called so.
    """

    def __init__(
        self,
        record: Record,
        model: Model,
        caller: str,
        device: str,
        instances: Callable[[str], Sequence[Instance]],
    ) -> None:
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
        self.submit = model.submit
        self.home = model.name
        self.needed = tuple(model.executed_by)
        self.instances = instances
        self.decoupled = said.decoupled
        self.origin = None if said.trace else UNTRACED
        self._said = said
        self._signature = record.signature
        self.context = RequestContext(
            flags=said.flags,
            correlation_id=said.correlation_id,
            correlation_text=said.correlation_text,
            timeout=said.timeout,
            parameters=said.parameters,
            shared=said.handed_on,
            device="" if said.host_outputs else device,
            outputs_for=caller,
        )
        self.shared = self.context if said.handed_on else self.context.changed(shared=True)
        self._encoded = b""

    def cause(self) -> Caused:
        """Return the request that traced ones come of."""
        return Caused(self.model.traces.find(self._said.trace))

    def fit(self, record: Record, sizes: Sequence[int]) -> tuple[bytes, bytes, int, RequestOptions]:
        """Return the signature, the dims, the batch size and the options of the request of a call.

        ``sizes``: the bytes of its inputs.

        Raises BridgeError: in Triton's words, when the inputs are not as the model's configuration
        wants them.
        """
        config, said = self.model.config, self._said
        inputs = [
            InputForm(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(
                self._signature.tensors, record.shapes, sizes, strict=True
            )
        ]
        check_inputs(record.identifier, inputs, config)
        shapes = [model_shape(entry, config) for entry in inputs]
        if not self._encoded:
            # A reshape gives an input its rank, whatever its shape is.
            tensors = [
                (each.name, each.datatype, len(shape))
                for each, shape in zip(inputs, shapes, strict=True)
            ]
            requested = tuple(dict.fromkeys(self._signature.requested))
            self._encoded = encode_signature(tensors, requested)
        batch_size = inputs[0].shape[0] if config.max_batch_size and inputs else 1
        names = [entry.name for entry in inputs]
        options = RequestOptions(
            timeout_us=said.timeout,
            correlation_id=said.correlation,
            start=bool(said.flags & _START),
            end=bool(said.flags & _END),
            shapes=tuple(zip(names, shapes, strict=True)),
        )
        return self._encoded, encode_dims(shapes), batch_size, options


class CalledModels:
    """Finds the models that are called."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._versions: dict[str, list[Model]] = {}

    def forget(self) -> None:
        """Models have changed."""
        self._versions.clear()

    def form(self, record: Record, caller: str, device: str) -> CallForm:
        """Return what a call of the model ``caller`` asks for; raises BridgeError."""
        said: CallContext = record.context
        model = self._find(said.model, said.version)
        return CallForm(record, model, caller, device, self.instances)

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
