"""Executes batches: builds requests over borrowed memory, calls ``execute``, encodes responses."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.pb_utils import InferenceRequest, Tensor
from gpubridge.pb_utils.trace import NO_TRACE, InferenceTrace
from gpubridge.stub.array_batches import Executes
from gpubridge.stub.bls.scope import BATCH
from gpubridge.stub.coroutine_answers import CoroutineAnswers
from gpubridge.stub.memory.client_memory import ClientMemory
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.stub.memory.placement import Placement
from gpubridge.stub.memory.states import SequenceStates
from gpubridge.stub.model_loop import ModelLoop
from gpubridge.stub.request_inputs import RequestInputs, control_input
from gpubridge.stub.response_encoder import (
    ModelIdentity,
    ResponseEncoder,
    error_context,
)
from gpubridge.stub.response_stream import RequestHandle, ResponseWriter
from gpubridge.stub.results import ResultSender, start_watcher
from gpubridge.stub.returned import checked_answers
from gpubridge.stub.signal_handlers import SignalHandlers
from gpubridge.tensor.native import NativeStubLoop
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import NO_LEASE, ControlPage
from gpubridge.transport.messages import Batch, ResponseFlag, encode_result_batch
from gpubridge.transport.records import Record, record_reader

if TYPE_CHECKING:
    from gpubridge.stub.device.inputs import DeviceInputs
    from gpubridge.stub.device.placement import DevicePlacement


class Executor:
    """Executes a batch and encodes its result.

    - ``shared_inputs``: makes inputs that others use as well.
    - ``plain``: whether requests without further fields need only tensors and responses, so that
      the compiled loop executes them by itself.
    - ``ended_at``: CLOCK_MONOTONIC nanoseconds at which the last ``execute`` ended.
    - ``signals``: holds signals back while the model's code does not run.
    - ``enter_batch``: notes for which batch this thread works from now on.
    - ``coroutines``: runs those of the model.
    """

    enter_batch = staticmethod(BATCH.set)

    def __init__(  # noqa: PLR0913  (it connects the parts of a stub)
        self,
        model: Executes,
        signals: SignalHandlers,
        identity: ModelIdentity,
        outputs: OutputMemory,
        control: ControlPage,
        results: ResultSender,
        clients: ClientMemory,
        states: SequenceStates | None,
        fall_back: Callable[[str, str], None],
        inputs: DeviceInputs | None,
        placement: DevicePlacement | None,
    ) -> None:
        self.model = model
        self.identity = identity
        self._outputs = outputs
        self._control = control
        self._clients = clients
        self._encoder = ResponseEncoder(
            identity,
            outputs,
            Placement(outputs, clients, placement),
            states,
            clients.borrowed,
            control.lent,
        )
        self._writer = ResponseWriter(control, outputs, results, self._encoder, identity)
        self._request_inputs = RequestInputs(identity, clients, states, inputs, fall_back)
        self.shared_inputs = self._request_inputs.shared
        self.coroutines = ModelLoop()
        self._coroutine_answers = CoroutineAnswers(
            identity, self._writer, self.coroutines, self._clients.refused
        )
        self._reader = record_reader(RequestContext)
        self.ended_at = 0
        self.signals = signals
        self.plain = states is None and not identity.iterative

    @property
    def has_lost_device(self) -> bool:
        """Return whether the process has lost its GPU context."""
        device = self._clients.device
        return device is not None and device.lost is not None

    def run(self, batch: Batch) -> bytes:
        """Execute one batch; returns its encoded result. Exceptions of the model become error responses."""
        cancelled = self._control.cancelled
        live = waiting = [record for record in batch.records if not cancelled[record.ticket]]
        self._request_inputs.begin_batch()
        started = self._control.start(batch.sequence)
        answers: list[bytes] = []
        clients = self._clients
        if clients.used:
            live = self._admitted(waiting, answers)
        self.enter_batch(batch.sequence)
        handles, called, outcome = self._outcome(live)
        if (self.shared_inputs.read_only or clients.used) and self.runs_again(outcome, handles):
            handles, called, outcome = self._outcome(live)
        responses = (
            self.errors_of(outcome, handles) if isinstance(outcome, BaseException) else outcome
        )
        # Otherwise an answered request would find its memory in use.
        del outcome
        self._request_inputs.let_go()
        self.ended_at = time.monotonic_ns()
        answers += [self._encoded(handle, responses, i) for i, handle in enumerate(handles)]
        if len(waiting) != len(batch.records):
            answers += self._encode_skipped(batch.records, waiting)
        times = started, called, self.ended_at
        return encode_result_batch(batch.sequence, times, self.take_copied(), answers)

    def _outcome(
        self, records: Sequence[Record]
    ) -> tuple[list[RequestHandle], int, list[Any] | BaseException]:
        """Call the model with requests of records; also returns when it was called.

        The outcome is a list of responses, or the exception of the batch.
        """
        handles = [self._writer.handle(record) for record in records]
        called = time.monotonic_ns()
        requests: list[InferenceRequest] = []
        try:
            requests = [self._request(handle) for handle in handles]
            called = time.monotonic_ns()
            responses = self._call(requests, handles) if records else []
            # This frame would keep the requests, and so their memory.
            requests = []
            if self.shared_inputs.watched:
                self.shared_inputs.learn()
            return handles, called, responses
        except BaseException as error:
            self.shared_inputs.forget()
            return handles, called, error
        finally:
            requests = []

    def runs_again(
        self, outcome: BaseException | Sequence[Any], handles: Sequence[RequestHandle]
    ) -> bool:
        """Return whether to run a batch once more, with copies: its model wrote to read-only inputs.

        Not if it may have sent a response. The requests of the first time are answered then.
        """
        refused = self.shared_inputs.refused(outcome), self._clients.refused(outcome)
        may_have_sent = self.identity.decoupled or any(each.sender is not None for each in handles)
        if may_have_sent or not any(refused):
            return False
        for handle in handles:
            record = handle.record
            for _, _, _, lease in record.refs:
                if lease != NO_LEASE:
                    # Of the first time no view may be left, which has ended the lease.
                    self._control.lent[lease] = 1
            self._request_inputs.hold(record)
            handle.end()
        if isinstance(outcome, BaseException):
            outcome.__traceback__ = None
        return True

    def _encoded(self, handle: RequestHandle, responses: list[Any], index: int) -> bytes:
        try:
            return self.encode_response(handle, responses, index)
        except BaseException as error:
            return self.encode_failure(handle, error)

    def encode_failure(self, handle: RequestHandle, error: BaseException) -> bytes:
        """Encode the error of a request whose response could not be encoded."""
        handle.end()
        return self._encoder.encode(handle.record, error_context(self.identity.known(error)))

    def handle_of(self, message: bytes, at: int) -> RequestHandle:
        """Make the handle of the request whose record begins at ``at`` in an EXECUTE message."""
        (record,), _ = self._reader.read(message, at, 1, True)
        return self._writer.handle(record)

    def control_tensors(self, text: str) -> list[Tensor]:
        """Make the control inputs from the JSON of a context."""
        return [control_input(*control) for control in json.loads(text)]

    def use(self, loop: NativeStubLoop | None) -> None:
        """Let the compiled loop, if there is one, send the responses of response senders."""
        if self.plain:
            self._writer.loop = loop

    def encode_response(self, handle: RequestHandle, responses: list[Any], index: int) -> bytes:
        """Encode the response of a request, and remove it from the list."""
        record = handle.record
        if responses[index] is None:
            flags = _RESCHEDULED if handle.reschedules() else _OPEN
            return self._encoder.encode_empty(record.ticket, flags)
        answer = self._encoder.encode_returned(record, responses, index)
        handle.end()
        if self._clients.used:
            self._clients.note_kept(record)
        return answer

    def take_copied(self) -> int:
        """Return the bytes copied for requests and responses since the last call."""
        copied = self._outputs.take_copied() + self._request_inputs.take_copied()
        if not self._clients.used:
            return copied
        self._clients.settle()
        return copied + self._clients.take_copied()

    def errors_of(self, error: BaseException, handles: Sequence[RequestHandle]) -> list[Any]:
        """Return the encoded error of a failed batch for each request without a response."""
        refusal = error_context(self.identity.known(error))
        if self._clients.used:
            self._clients.note_error(error)
        # The frames of a traceback keep the requests, and so their memory.
        error.__traceback__ = None
        return [self._close_sender(handle, refusal) for handle in handles]

    @staticmethod
    def start_thread(run: Callable[[], None]) -> bool:
        """Start the thread that sends finished results during a slow batch; False: the system has none."""
        return start_watcher(run)

    def note_cancelled(self, ticket: int) -> None:
        """Tell the coroutine of a request that is cancelled, if it wants to know."""
        self._writer.cancellations.tell(ticket)

    def _request(self, handle: RequestHandle) -> InferenceRequest:
        record = handle.record
        context: RequestContext = record.context
        return InferenceRequest._received(
            self._request_inputs.of(record),
            record.identifier,
            context.correlation,
            record.signature.wanted or self.identity.outputs,
            context.flags,
            context.timeout,
            context.parameters or "{}",
            self.identity.name,
            self.identity.version,
            handle,
            InferenceTrace._of(context.trace, context.trace_context) if context.trace else NO_TRACE,
        )

    def _admitted(self, records: Sequence[Record], answers: list[bytes]) -> list[Record]:
        """Return the requests whose client memory is valid; encode errors for the others."""
        admitted = []
        for record in records:
            error = self._clients.refusal(record)
            if error is None:
                admitted.append(record)
            else:
                self._release(record.ticket)
                answers.append(self._encoder.encode(record, error_context(error)))
        return admitted

    def _call(
        self, requests: list[InferenceRequest], handles: Sequence[RequestHandle]
    ) -> list[Any]:
        """Call the model and check its return value."""
        responses = self.signals.call(self.model.execute, requests)
        return self.checked_responses(responses, handles)

    def checked_responses(self, responses: Any, handles: Sequence[RequestHandle]) -> list[Any]:
        """Return the responses that ``execute`` returned, having run it if it is a coroutine.

        A response is None where the model uses a response sender. Raises ContractError for a wrong
        return value.
        """
        if type(responses) is not list and inspect.iscoroutine(responses):
            if self.identity.overlaps:
                self.signals.call(self._coroutine_answers.start, responses, list(handles))
                return [None] * len(handles)
            responses = self.signals.call(self.coroutines.run, responses)
        return checked_answers(self.identity, responses, handles)

    @staticmethod
    def _close_sender(handle: RequestHandle, refusal: bytes) -> bytes | None:
        """Close the sender of a failed model's request; None where the request was answered."""
        return refusal if handle.close() and not handle.end_answered() else None

    def _encode_skipped(self, records: Sequence[Record], live: Sequence[Record]) -> list[bytes]:
        """Encode empty responses for cancelled requests, and release their memory."""
        run = {record.ticket for record in live}
        skipped = [record.ticket for record in records if record.ticket not in run]
        for ticket in skipped:
            self._release(ticket)
        return [self._encoder.encode_empty(ticket, ResponseFlag.CANCELLED) for ticket in skipped]

    def _release(self, ticket: int) -> None:
        """Release the memory of a request that was not passed to the model."""
        self._control.lent[ticket] = 0


_OPEN = ResponseFlag.OPEN | ResponseFlag.EMPTY
_RESCHEDULED = ResponseFlag.RESCHEDULED | ResponseFlag.EMPTY
