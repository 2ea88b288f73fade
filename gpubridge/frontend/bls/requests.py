"""BLS calls as requests for the called models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpubridge.dataplane import CallCounts
from gpubridge.engine.models.model import Model
from gpubridge.engine.models.tracing import UNTRACED, Caused
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.supervisor.instance import Instance
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.model_io import (
    InputForm,
    as_configured,
    check_inputs,
    model_shape,
    unexpected_output,
)
from gpubridge.protocol.fields import text_of_sequence
from gpubridge.protocol.response_encoding import reshapes
from gpubridge.request import InferResponse, RequestOptions
from gpubridge.transport.context import CallContext, RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Shapes, Signature, encode_dims, encode_signature

_START, _END = 1, 2


class CallForm:
    """Template of calls of one signature and context.

    - ``record``: the first of these calls.
    - ``model``: the called model.
    - ``caller``: the name of the calling model.
    - ``device``: the UUID of the GPU on which the caller's outputs can stay; empty for none.
    - ``instances``: returns the instances of all versions of a model.

    The compiled module reads these attributes, besides ``model`` and ``instances``:

    - ``counts``: the calls from the caller's model to the called one; set by who asks for the template.
    - ``submit``: submits requests.
    - ``home``: the name of the called model.
    - ``needed``: the models that execute the requests.
    - ``context``, ``shared``: the context of requests; the second if others may read the inputs.
    - ``decoupled``: whether the caller accepts any number of responses.
    - ``reshape``: returns signature and shapes of a response as the configuration has them; None where those
      are the model's own.
    - ``origin``: the origin of requests; None if `cause` returns it.

    Raises BridgeError: with Triton's text, when the model cannot be called so.
    """

    counts: CallCounts

    def __init__(
        self,
        record: Record,
        model: Model,
        caller: str,
        device: str,
        instances: Callable[[str], Sequence[Instance]],
    ) -> None:
        context: CallContext = record.context
        if model.config.decoupled and not context.decoupled:
            raise BridgeError(_NOT_DECOUPLED.format(context.model), ErrorCode.UNSUPPORTED)
        for name in record.signature.requested:
            if name not in model.config.outputs_by_name:
                raise unexpected_output(name, model.config)
        if context.correlation_text:
            text_of_sequence(context.correlation_text)
        self.model = model
        self.submit = model.submit
        self.needed = tuple(model.executed_by)
        self.instances = instances
        self.decoupled = context.decoupled
        self.reshape = self._as_configured if reshapes(model.config) else None
        # Of the last response, since the next mostly has the same.
        self._returned: Signature | None = None
        self._configured = Signature((), ())
        self.origin = None if context.trace else UNTRACED
        self._call = context
        self._signature = record.signature
        self.context = RequestContext(
            flags=context.flags,
            correlation_id=context.correlation_id,
            correlation_text=context.correlation_text,
            timeout=context.timeout,
            parameters=context.parameters,
            shared=context.handed_on,
            device="" if context.host_outputs else device,
            outputs_for=caller,
        )
        self.shared = self.context if context.handed_on else self.context.changed(shared=True)
        self._encoded = b""

    @property
    def home(self) -> str:
        """The name of the called model."""
        return self.model.name

    def cause(self) -> Caused:
        """Return the origin of requests that are traced with the caller's."""
        return Caused(self.model.traces.find(self._call.trace), self._call.span)

    def _as_configured(self, response: InferResponse) -> tuple[Signature, Shapes]:
        """Return the signature and the shapes that the caller sees; raises BridgeError."""
        config, returned = self.model.config, response.signature
        shapes = tuple(
            as_configured(spec.name, shape, config)
            for spec, shape in zip(returned.tensors, response.shapes, strict=True)
        )
        if returned is not self._returned:
            # The rank of an output depends on the configured reshape only.
            tensors = tuple(
                spec._replace(rank=len(shape))
                for spec, shape in zip(returned.tensors, shapes, strict=True)
            )
            self._returned, self._configured = returned, returned._replace(tensors=tensors)
        return self._configured, shapes

    def fit(self, record: Record, sizes: Sequence[int]) -> tuple[bytes, bytes, int, RequestOptions]:
        """Return signature, dims, batch size and options of the request of a call.

        ``sizes``: the sizes of its inputs.

        Raises BridgeError: with Triton's text, when the inputs do not match the model's configuration.
        """
        config, call = self.model.config, self._call
        inputs = [
            InputForm(spec.name, spec.datatype, shape, nbytes)
            for spec, shape, nbytes in zip(
                self._signature.tensors, record.shapes, sizes, strict=True
            )
        ]
        check_inputs(record.identifier, inputs, config)
        shapes = [model_shape(entry, config) for entry in inputs]
        if not self._encoded:
            # The rank of an input depends on the configured reshape only.
            tensors = [
                (each.name, each.datatype, len(shape))
                for each, shape in zip(inputs, shapes, strict=True)
            ]
            requested = tuple(dict.fromkeys(self._signature.requested))
            self._encoded = encode_signature(tensors, requested)
        batch_size = inputs[0].shape[0] if config.max_batch_size and inputs else 1
        names = [entry.name for entry in inputs]
        options = RequestOptions(
            timeout_us=call.timeout,
            correlation_id=call.correlation,
            start=bool(call.flags & _START),
            end=bool(call.flags & _END),
            shapes=tuple(zip(names, shapes, strict=True)),
        )
        return self._encoded, encode_dims(shapes), batch_size, options


class CalledModels:
    """Finds called models."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._versions: dict[str, list[Model]] = {}

    def forget(self) -> None:
        """Drop cached models: served models have changed."""
        self._versions.clear()

    def form(self, record: Record, caller: str, device: str) -> CallForm:
        """Return the template of a call by the model ``caller``; raises BridgeError."""
        call: CallContext = record.context
        version = None if call.version == -1 else call.version
        model = self._repository.find(call.model, version)
        return CallForm(record, model, caller, device, self.instances)

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
