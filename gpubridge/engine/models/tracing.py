"""Traces sampled requests of a model from their arrival to their outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError
from gpubridge.request import CompletedBatch, InferRequest, InferResponse
from gpubridge.telemetry.traces import AnyTrace, Traces
from gpubridge.transport.signatures import SignatureCache, TensorSpec, decode_shapes

_WAITED = {"HTTP": "HTTP_RECV", "GRPC": "GRPC_WAITREAD"}
"""Triton's name of the receive span, by protocol."""


class Received(NamedTuple):
    """Receive span of a request from HTTP or GRPC, in CLOCK_MONOTONIC nanoseconds.

    ``context``: the values of its headers traceparent and tracestate, if the first is there and may
    matter.
    """

    protocol: str
    start: int
    end: int
    context: tuple[bytes, bytes] | None = None


def trace_context(
    traces: Traces, field: Callable[[bytes], bytes | None]
) -> tuple[bytes, bytes] | None:
    """Return the headers of a trace context, which ``field`` finds, if they matter."""
    parent = field(b"traceparent") if traces.sampling.contexts else None
    return None if parent is None else (parent, field(b"tracestate") or b"")


class Caused(NamedTuple):
    """Origin of a request that another request caused.

    - ``trace``: the trace of the other, if any.
    - ``span``: the number of the span in the process of its model; 0 for none.
    """

    trace: AnyTrace | None
    span: int = 0


UNTRACED = Caused(None)
"""Origin of a request caused by a request that is not traced."""

Origin = Received | Caused
"""Origin of a request, as its trace records it."""


class RequestTracing:
    """Begins the traces of one model version's requests."""

    def __init__(self, traces: Traces, model: str, version: int) -> None:
        self._traces = traces
        self._model = model
        self._version = version
        self._signatures = SignatureCache(64)

    def begin(self, request: InferRequest, origin: Origin | None) -> None:
        """Begin the trace of a sampled request; call before the scheduler gets the request."""
        about = self._model, self._version, request.identifier
        received = None
        trace: AnyTrace | None
        if origin is None:
            # As the data plane counts those that Python does not see.
            self._traces.sampling.count()
            return
        if isinstance(origin, Caused):
            cause, span = origin
            trace = None if cause is None else self._traces.child(cause, *about, span)
        else:
            trace = self._traces.sample(*about, origin.context)
            received = origin
        if trace is None:
            return
        if received is not None:
            name = _WAITED[received.protocol]
            trace.stamp(f"{name}_START", received.start)
            trace.stamp(f"{name}_END", received.end)
        trace.stamp("REQUEST_START")
        caused = isinstance(origin, Caused)
        request.trace = _Followed(
            trace, request, received.protocol if received else "", caused=caused
        )
        if trace.tensors:
            self._note_inputs(trace, request)

    @staticmethod
    def tell(request: InferRequest) -> None:
        """Send the trace id with the request, so that BLS calls of its model join the trace."""
        if request.trace is not None:
            trace: AnyTrace = request.trace.trace
            request.context = request.context.changed(
                trace=trace.identifier, trace_context=trace.context
            )

    def completed(self, batches: Sequence[CompletedBatch]) -> None:
        """Record the times of completed batches in the traces of their requests."""
        for batch in batches:
            for request in batch.requests:
                if request.trace is not None:
                    request.trace.completed(batch)

    def _note_inputs(self, trace: AnyTrace, request: InferRequest) -> None:
        slot = request.slot
        signature = self._signatures[request.signature]
        shapes = decode_shapes(signature, request.dims)
        for i, (spec, shape) in enumerate(zip(signature.tensors, shapes, strict=True)):
            view = None
            # Memory that the server does not own is not read: its owner may unmap it.
            if request.ranges is None and slot is not None:
                at, nbytes = request.places[i]
                view = slot.memory[request.start + at : request.start + at + nbytes]
            _note("TENSOR_QUEUE_INPUT", trace, spec, shape, view)


class _Followed:
    """Wraps the callbacks of a traced request.

    The outcome and the times of the batch arrive in any order; the trace ends when both are there,
    or with an error that belongs to no batch.
    """

    def __init__(
        self, trace: AnyTrace, request: InferRequest, protocol: str, *, caused: bool
    ) -> None:
        self.trace = trace
        self._caused = caused
        self._request = request
        self._protocol = protocol
        self._completed = self._answered = self._ended = False
        # When the outcome came: before it ends the requests that caused this one.
        self._passed = 0
        self._on_done = request.on_done
        self._on_partial = request.on_partial
        request.on_done = self._finish
        if request.on_partial is not None:
            request.on_partial = self._respond

    def completed(self, batch: CompletedBatch | None) -> None:
        """Record the times of its batch; None for an ensemble, which has no batches."""
        trace = self.trace
        self._completed = True
        trace.stamp("QUEUE_START", self._request.arrived)
        if batch is not None:
            self._computed(trace, batch)
        if self._answered:
            self._end()

    def _computed(self, trace: AnyTrace, batch: CompletedBatch) -> None:
        trace.stamp("COMPUTE_START", batch.started)
        trace.stamp("COMPUTE_INPUT_END", batch.called)
        trace.stamp("COMPUTE_OUTPUT_START", batch.ended)
        if self._passed:
            # A decoupled model may send its last response before its `execute` returns.
            self._passed = max(self._passed, batch.ended)
        about = {"gpubridge.batch": batch.sequence, "gpubridge.batch_requests": len(batch.requests)}
        trace.stamp("COMPUTE_END", self._passed, **about)

    def abandoned(self) -> None:
        """Note that the request was cancelled."""
        self.trace.fail("the request was cancelled")
        self._end()

    def _respond(self, outcome: Any) -> None:
        self._pass_on(outcome, self._on_partial)

    def _finish(self, outcome: Any) -> None:
        self._pass_on(outcome, self._on_done, last=True)
        self._answered = True
        if self._completed:
            self._end()
        elif isinstance(outcome, BridgeError):
            # If it has a batch, that completes in this iteration of the event loop.
            asyncio.get_running_loop().call_soon(self._end)

    def _pass_on(
        self, outcome: Any, to: Callable[[Any], None] | None, *, last: bool = False
    ) -> None:
        trace = self.trace
        if isinstance(outcome, BridgeError):
            trace.fail(outcome.message)
        if outcome is not None and not self._caused:
            trace.stamp("INFER_RESPONSE_COMPLETE")
        if trace.tensors and isinstance(outcome, InferResponse):
            tensors = zip(outcome.signature.tensors, outcome.shapes, outcome.visible(), strict=True)
            for spec, shape, buffer in tensors:
                _note("TENSOR_BACKEND_OUTPUT", trace, spec, shape, buffer)
        begun = time.monotonic_ns()
        if last:
            self._passed = begun
        if to is not None:
            to(outcome)
        if self._protocol:
            trace.stamp(f"{self._protocol}_SEND_START", begun)
            trace.stamp(f"{self._protocol}_SEND_END")

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.trace.stamp("REQUEST_END", self._passed)
            self.trace.end()


def _note(
    activity: str,
    trace: AnyTrace,
    spec: TensorSpec,
    shape: tuple[int, ...],
    view: memoryview | None,
) -> None:
    """Record a tensor: copy its bytes now, format its values later."""
    named = spec.name, spec.datatype, shape
    if view is None:
        trace.tensor(activity, named, None, 0)
    else:
        spell = partial(_spell, spec.datatype, shape, bytes(view))
        trace.tensor(activity, named, spell, len(view))


def _spell(datatype: str, shape: tuple[int, ...], data: bytes) -> Iterator[str]:
    """Yield the text of a tensor's values, in the writer's thread."""
    # It needs NumPy, which the server does without until then.
    from gpubridge.tensor.bytes_codec import spell_values  # noqa: PLC0415

    return spell_values(datatype, shape, data)
