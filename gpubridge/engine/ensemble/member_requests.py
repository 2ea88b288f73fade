"""Requests of an ensemble to its members, with inputs passed without a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.config import ModelConfig
from gpubridge.engine.ensemble.execution import DeviceEdges
from gpubridge.engine.ensemble.graph import Step, fit_shape
from gpubridge.engine.ensemble.tensors import ClientOutputs, EdgeTensor, StepOutputs
from gpubridge.engine.memory.device_region import OF_CLIENTS
from gpubridge.host_shm import Segment
from gpubridge.model_io import InputForm, check_inputs, model_shape
from gpubridge.request import NO_CONTEXT, InferRequest, MemoryRange, RequestOptions
from gpubridge.transport.context import RequestContext
from gpubridge.transport.signatures import encode_tensors

if TYPE_CHECKING:
    from gpubridge.engine.ensemble.execution import Execution

_FORMS_KEPT = 512


class _ClientMemory:
    """The client's memory that a member's request reads or writes; keeps it registered."""

    __slots__ = ("_ranges", "_targets", "outputs")

    def __init__(
        self, ranges: Sequence[MemoryRange], targets: ClientOutputs | None, outputs: StepOutputs
    ) -> None:
        self._ranges = ranges
        self._targets = targets
        self.outputs = frozenset(outputs.out)

    @property
    def segments(self) -> list[Any]:
        """Return the segments that the stub must map."""
        found = (part.segment for part in self._ranges)
        read = [segment for segment in found if isinstance(segment, OF_CLIENTS)]
        return read if self._targets is None else [*read, *self._targets.segments]


_NO_OUTPUTS = StepOutputs({}, {})


class _Form(NamedTuple):
    """Encoded form shared by all requests of a step with the same datatypes and shapes."""

    config: ModelConfig
    names: tuple[str, ...]
    signature: bytes
    dims: bytes
    batch_size: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    options: dict[RequestOptions, RequestOptions]


class MemberRequests:
    """Makes the requests of one ensemble; caches their forms, so that each is checked once."""

    def __init__(self, edges: DeviceEdges) -> None:
        self._edges = edges
        self._forms: dict[Any, _Form] = {}
        self._contexts: dict[Any, RequestContext] = {}

    def make(
        self,
        step: Step,
        tensors: Mapping[str, EdgeTensor],
        config: ModelConfig,
        execution: Execution,
        on_done: Callable[[Any], None],
        *,
        devices: bool,
    ) -> InferRequest:
        """Return the request of a step; raises BridgeError.

        ``execution``: its client's request, whose options and parameters are passed on.
        """
        client, plan = execution.request, execution.plan
        form = self._form(step, tensors, config, client.identifier)
        options = _options(form, client.options)
        ranges = [tensors[name].place for name in form.names]
        read_only = (
            any(tensor.shared for tensor in tensors.values())
            or any(tensor in plan.shared for tensor in step.inputs.values())
            or _for_others(ranges, (config.name, *execution.homes))
        )
        request = InferRequest(
            form.signature,
            None,
            0,
            (),
            on_done,
            client.identifier,
            NO_CONTEXT,
            0,
            form.batch_size,
            options,
            form.dims,
        )
        request.ranges = ranges
        request.account = client.account
        on_device = {}
        if devices:
            wanted = client.context.device or None
            on_device = self._edges.of_step(step, plan, wanted)
        self._set_context(request, step, execution, on_device, read_only=read_only)
        return request

    def _form(
        self,
        step: Step,
        tensors: Mapping[str, EdgeTensor],
        config: ModelConfig,
        identifier: str,
    ) -> _Form:
        key = (
            step.index,
            *(
                (name, t.datatype, t.shape, t.batched, t.place.nbytes)
                for name, t in tensors.items()
            ),
        )
        form = self._forms.get(key)
        if form is None or form.config is not config:
            form = _form(step, tensors, config, identifier)
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = form
        return form

    def _set_context(
        self,
        request: InferRequest,
        step: Step,
        execution: Execution,
        on_device: dict[str, str],
        *,
        read_only: bool,
    ) -> None:
        """Set the context and client memory of a member's request."""
        ranges = request.ranges or ()
        client, targets = execution.request, execution.targets
        inside = tuple(i for i, p in enumerate(ranges) if isinstance(p.segment, OF_CLIENTS))
        uses = execution.plan.uses
        outputs = _NO_OUTPUTS if targets is None else targets.of_step(step, uses)
        consumer = execution.plan.consumers.get(step.index, client.context.outputs_for)
        if outputs.out or outputs.also:
            request.client = _ClientMemory(ranges, targets, outputs)
            context = _passed_on(client.context, read_only, inside, outputs, on_device, consumer)
            request.context = context
            return
        request.context = self._context(client.context, read_only, inside, on_device, consumer)
        if inside:
            request.client = _ClientMemory(ranges, None, outputs)

    def _context(
        self,
        client: RequestContext,
        read_only: bool,
        inside: tuple[int, ...],
        on_device: dict[str, str],
        consumer: str,
    ) -> RequestContext:
        """Return the context for a member's stub, from a cache where possible.

        ``inside``: the inputs that lie in the client's own memory.
        """
        if client is NO_CONTEXT and not (read_only or inside or on_device or consumer):
            return NO_CONTEXT
        if isinstance(client.parameters, memoryview):
            # Its encoding, the cache key, lacks long parameters.
            return _passed_on(client, read_only, inside, _NO_OUTPUTS, on_device, consumer)
        key = client.encoded(), read_only, inside, tuple(on_device.items()), consumer
        kept = self._contexts.get(key)
        if kept is None:
            kept = _passed_on(client, read_only, inside, _NO_OUTPUTS, on_device, consumer)
            if len(self._contexts) >= _FORMS_KEPT:
                self._contexts.clear()
            self._contexts[key] = kept
        return kept


def _passed_on(
    client: RequestContext,
    read_only: bool,
    inside: tuple[int, ...],
    outputs: StepOutputs,
    on_device: dict[str, str],
    consumer: str,
) -> RequestContext:
    memory = {"in": inside, **outputs._asdict()}
    return RequestContext(
        flags=client.flags,
        correlation_id=client.correlation_id,
        correlation_text=client.correlation_text,
        timeout=client.timeout,
        parameters=client.parameters,
        shared=read_only,
        client=memory if any(memory.values()) else None,
        device_outputs=on_device or None,
        outputs_for=consumer,
    )


def _options(form: _Form, given: RequestOptions) -> RequestOptions:
    """Return a client's options with the shapes of a member's inputs."""
    options = form.options.get(given)
    if options is None:
        options = replace(given, shapes=form.shapes, shape_id=None)
        if len(form.options) >= _FORMS_KEPT:
            form.options.clear()
        form.options[given] = options
    return options


def _form(
    step: Step, tensors: Mapping[str, EdgeTensor], config: ModelConfig, identifier: str
) -> _Form:
    batched = config.max_batch_size > 0
    known = config.inputs_by_name
    # In the order of the member's configuration, on which its code may rely.
    names = [name for name in known if name in tensors]
    names += [name for name in tensors if name not in known]
    given = []
    for name in names:
        tensor = tensors[name]
        spec = known.get(name)
        shape = tensor.shape
        if spec is not None:
            shape = fit_shape(shape, spec.dims, made_batched=tensor.batched, batched=batched)
        given.append(InputForm(name, tensor.datatype, shape, tensor.place.nbytes))
    check_inputs(identifier, given, config)
    signature, dims = encode_tensors(
        [(entry.name, entry.datatype, model_shape(entry, config)) for entry in given],
        tuple(step.outputs),
    )
    return _Form(
        config,
        tuple(names),
        signature,
        dims,
        given[0].shape[0] if batched and given else 1,
        tuple((entry.name, entry.shape) for entry in given),
        {},
    )


def _for_others(ranges: Iterable[MemoryRange], names: Collection[str]) -> bool:
    """Return whether some ranges lie in memory of other models, which must be mapped read-only."""
    for part in ranges:
        segment = part.segment
        if isinstance(segment, Segment) and segment.home not in names:
            return True
    return False
