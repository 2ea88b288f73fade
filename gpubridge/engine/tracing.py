"""Follows the requests of a model that are traced, from their arrival to their outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError
from gpubridge.request import CompletedBatch, InferRequest, InferResponse
from gpubridge.telemetry.traces import Trace, Traces
from gpubridge.tensor.bytes_codec import spell_values
from gpubridge.transport.signatures import SignatureCache, TensorSpec, decode_shapes

_WAITED = {"HTTP": "HTTP_RECV", "GRPC": "GRPC_WAITREAD"}
"""Triton's name for the time in which a request is received, by protocol."""


class Received(NamedTuple):
    """Time in which a request was received over HTTP or GRPC: CLOCK_MONOTONIC nanoseconds."""

    door: str
    start: int
    end: int


class Caused(NamedTuple):
    """A request comes of another one: it is traced if that one is, whose trace this is."""

    trace: Trace | None


UNTRACED = Caused(None)
"""Origin of requests that are made for one that is not traced."""

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
        """Begin a request's trace if it is to have one; before the scheduler gets the request."""
        about = self._model, self._version, request.identifier
        received = None
        trace: Trace | None
        if isinstance(origin, Caused):
            trace = None if origin.trace is None else self._traces.child(origin.trace, *about)
        else:
            trace = self._traces.sample(*about)
            received = origin
        if trace is None:
            return
        if received is not None:
            name = _WAITED[received.door]
            trace.stamp(f"{name}_START", received.start)
            trace.stamp(f"{name}_END", received.end)
        trace.stamp("REQUEST_START")
        caused = isinstance(origin, Caused)
        request.trace = _Followed(trace, request, received.door if received else "", caused=caused)
        if trace.tensors:
            self._note_inputs(trace, request)

    @staticmethod
    def tell(request: InferRequest) -> None:
        """Let a request's stub know its trace, for the calls that come of it."""
        if request.trace is not None:
            request.context = request.context.changed(trace=request.trace.trace.identifier)

    def completed(self, batches: Sequence[CompletedBatch]) -> None:
        """Tell the requests that are traced that their batches are over."""
        for batch in batches:
            for request in batch.requests:
                if request.trace is not None:
                    request.trace.completed(batch)

    def _note_inputs(self, trace: Trace, request: InferRequest) -> None:
        slot = request.slot
        signature = self._signatures[request.signature]
        shapes = decode_shapes(signature, request.dims)
        for i, (spec, shape) in enumerate(zip(signature.tensors, shapes, strict=True)):
            view = None
            # Memory that the server does not own is not looked at: who does may take it away.
            if request.ranges is None and slot is not None:
                at, nbytes = request.places[i]
                view = slot.memory[request.start + at : request.start + at + nbytes]
            _note("TENSOR_QUEUE_INPUT", trace, spec, shape, view)


class _Followed:
    """A traced request: stands between the model and who waits for the outcome.

    The outcome and the times of the batch come in no fixed order; the trace is complete with both,
    or with an error that no batch goes with.
    """

    def __init__(self, trace: Trace, request: InferRequest, door: str, *, caused: bool) -> None:
        self.trace = trace
        self._caused = caused
        self._request = request
        self._door = door
        self._completed = self._answered = False
        self._on_done = request.on_done
        self._on_partial = request.on_partial
        request.on_done = self._finish
        if request.on_partial is not None:
            request.on_partial = self._respond

    def completed(self, batch: CompletedBatch | None) -> None:
        """Its batch is over; None for a model that has no batches, as it computes nothing itself."""
        trace = self.trace
        self._completed = True
        trace.stamp("QUEUE_START", self._request.arrived)
        if batch is not None:
            self._computed(trace, batch)
        if self._answered:
            self._end()

    @staticmethod
    def _computed(trace: Trace, batch: CompletedBatch) -> None:
        trace.stamp("COMPUTE_START", batch.started)
        trace.stamp("COMPUTE_INPUT_END", batch.called)
        trace.stamp("COMPUTE_OUTPUT_START", batch.ended)
        trace.stamp("COMPUTE_END")

    def abandoned(self) -> None:
        """Note that the request was cancelled."""
        self._end()

    def _respond(self, outcome: Any) -> None:
        self._pass_on(outcome, self._on_partial)

    def _finish(self, outcome: Any) -> None:
        self._pass_on(outcome, self._on_done)
        self._answered = True
        if self._completed:
            self._end()
        elif isinstance(outcome, BridgeError):
            # Its batch completes in this turn of the event loop, if there is one.
            asyncio.get_running_loop().call_soon(self._end)

    def _pass_on(self, outcome: Any, to: Callable[[Any], None] | None) -> None:
        trace = self.trace
        if outcome is not None and not self._caused:
            trace.stamp("INFER_RESPONSE_COMPLETE")
        if trace.tensors and isinstance(outcome, InferResponse):
            tensors = zip(outcome.signature.tensors, outcome.shapes, outcome.visible(), strict=True)
            for spec, shape, buffer in tensors:
                _note("TENSOR_BACKEND_OUTPUT", trace, spec, shape, buffer)
        begun = time.monotonic_ns()
        if to is not None:
            to(outcome)
        if self._door:
            trace.stamp(f"{self._door}_SEND_START", begun)
            trace.stamp(f"{self._door}_SEND_END")

    def _end(self) -> None:
        self.trace.stamp("REQUEST_END")
        self.trace.end()


def _note(
    activity: str,
    trace: Trace,
    spec: TensorSpec,
    shape: tuple[int, ...],
    view: memoryview | None,
) -> None:
    """Note a tensor: its bytes are copied, its values are spelt later."""
    named = spec.name, spec.datatype, shape
    if view is None:
        trace.tensor(activity, named, None, 0)
    else:
        spell = partial(spell_values, spec.datatype, shape, bytes(view))
        trace.tensor(activity, named, spell, len(view))
