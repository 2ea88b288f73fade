"""Responses that a model sends through response senders: from any thread, until the final one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Logger, Tensor, TritonModelException
from gpubridge.pb_utils.response import InferenceResponseSender
from gpubridge.stub.cancellations import Cancellations
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.stub.response_encoder import ModelIdentity, ResponseEncoder, error_context
from gpubridge.stub.results import ResultSender
from gpubridge.tensor.native import NativeStubLoop
from gpubridge.transport.channel import ChannelClosed
from gpubridge.transport.control import ABANDONED, GIVEN_UP, ControlPage
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubridge.pb_utils.datatypes import OutputForm

_MOST_RESPONSES = 64
_MOST_BYTES = 1 << 20
"""So many responses, and below so many bytes of them, are on their way."""
_U32 = 0xFFFF_FFFF
_FIRST_PAUSE = 0.0002
# Reentrant: a finalizer or a signal's handler of the model may ask, too.
_making = threading.RLock()
_LONGEST_PAUSE = 0.01
_DROPPED = BridgeError(
    "the model dropped this request without sending a response; get its response sender and send one, "
    "or the final flag",
    ErrorCode.INTERNAL,
)
_CUT = BridgeError(
    "the model is being unloaded, and its responses since then were not sent, as those before wait for "
    "their client: read them faster",
    ErrorCode.UNAVAILABLE,
)


class ResponseWriter:
    """Sends responses of all requests; ``loop`` sends plain ones."""

    __slots__ = ("cancellations", "control", "encoder", "identity", "loop", "outputs", "results")

    def __init__(
        self,
        control: ControlPage,
        outputs: OutputMemory,
        results: ResultSender,
        encoder: ResponseEncoder,
        identity: ModelIdentity,
    ) -> None:
        self.control = control
        self.cancellations = Cancellations(control)
        self.outputs = outputs
        self.results = results
        self.encoder = encoder
        self.identity = identity
        self.loop: NativeStubLoop | None = None

    def handle(self, record: Record) -> RequestHandle:
        """Make the handle of a request that has arrived."""
        return RequestHandle(self, record)

    def send(self, record: Record, response: InferenceResponse, final: bool) -> None:
        """Send a response of a request; ChannelClosed when the server is gone."""
        if self.loop is not None and record.context.client is None:
            wanted = record.signature.wanted or self.identity.outputs
            try:
                consumer = record.context.outputs_for
                if self.loop.respond(record.ticket, response, final, wanted, consumer):
                    return
            except OSError as error:
                raise ChannelClosed from error
        answer = self.encoder.encode(record, response, 0 if final else ResponseFlag.OPEN)
        self.results.respond(answer, self.outputs.take_copied())


class RequestHandle:
    """A received request in the model's process: its cancellation, outputs and response sender.

    Deleting that of a request which is left to the model ends it, if nobody ever got its response sender.

    ``unanswered``: what the request ends with then; None for one that ``execute`` is to answer.
    """

    # ``was_cancelled`` is set once the request is answered; few requests outlive their batch.
    __slots__ = ("_writer", "record", "rescheduled", "sender", "unanswered", "was_cancelled")
    was_cancelled: bool

    def __init__(self, writer: ResponseWriter, record: Record) -> None:
        self._writer = writer
        self.record = record
        self.rescheduled = False
        self.sender: InferenceResponseSender | None = None
        self.unanswered: Exception | None = _DROPPED if writer.identity.decoupled else None

    def __del__(self) -> None:
        why, self.unanswered = self.unanswered, None
        if self.sender is None and why is not None:
            StubResponseStream(self._writer, self.record).sender_dropped(0, why)

    def cancelled(self) -> bool:
        """Return whether the request is cancelled or, once answered, whether it had been."""
        if self.sender is not None and self.sender._closed:
            return self.sender.is_cancelled()
        if hasattr(self, "was_cancelled"):
            return self.was_cancelled
        return self._writer.control.cancelled[self.record.ticket] != 0

    def on_cancel(self, react: Callable[[], object]) -> AbstractContextManager[None]:
        """Call ``react`` on the running event loop once the open request is cancelled, in a block."""
        return self._writer.cancellations.watched(self.record.ticket, react)

    def response_sender(self) -> InferenceResponseSender:
        """Return the request's sender, the same at each call; a closed one once it is answered."""
        if self.sender is None:
            with _making:
                made = self._made_sender() if self.sender is None else None
                # Who asks within this thread may have made it meanwhile.
                if self.sender is None:
                    self.sender = made
                elif made is not None:
                    made._closed = True
        assert self.sender is not None
        return self.sender

    def _made_sender(self) -> InferenceResponseSender:
        stream = StubResponseStream(self._writer, self.record)
        if not hasattr(self, "was_cancelled"):
            return InferenceResponseSender._on(stream)
        # What it would send, another request's client would get.
        stream.end(self.was_cancelled)
        return InferenceResponseSender._on(stream, closed=True)

    def end(self) -> None:
        """Note that the request is answered: its ticket will be another request's."""
        self.unanswered = None
        self.was_cancelled = self._writer.control.cancelled[self.record.ticket] != 0

    def output(
        self, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in host memory that is sent without a copy."""
        self._check_open(name)
        placement = self._writer.encoder.placement
        return placement.allocate(self.record, name, datatype, shape, dtype)

    def output_on_device(self, form: OutputForm) -> Tensor:
        """Make an output tensor on the stub's GPU that is sent without a copy."""
        self._check_open(form.name)
        return self._writer.encoder.placement.allocate_on_device(self.record, form)

    def _check_open(self, name: str) -> None:
        if hasattr(self, "was_cancelled") or (self.sender is not None and self.sender._closed):
            raise TritonModelException(
                f"output '{name}': expected a request that is not answered yet, got one that is: the "
                "place where its outputs go may be another request's"
            )

    def reschedule(self, wanted: bool) -> None:
        """Set whether the model gets the request again."""
        if wanted and not self._writer.identity.iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model "
                "is not configured to handle such a flag. Set 'iterative_sequence: true' in its "
                "sequence_batching."
            )
        self.rescheduled = wanted

    def reschedules(self) -> bool:
        """Return whether the request is rescheduled, after its batch; closes its sender then."""
        if not self.rescheduled:
            return False
        if self.close():
            return True
        Logger.log_warn(
            "a request was released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE after its final "
            "response was sent: it is not run again"
        )
        return False

    def close_unless_sent(self) -> bool:
        """End the request if it has sent nothing by its sender; returns whether it had not."""
        return self._close(unless_sent=True)

    def close(self) -> bool:
        """End the request; returns whether it had no final response yet."""
        return self._close(unless_sent=False)

    def _close(self, *, unless_sent: bool) -> bool:
        with _making:
            was_open = not hasattr(self, "was_cancelled")
            if self.sender is None:
                # One that is made later is closed.
                self.end()
            if self.sender is None:
                return was_open
        return self.sender._close(unless_sent=unless_sent)

    def fail(self, error: BridgeError) -> None:
        """Answer the request with an error unless it has ended; any thread may."""
        if self.close() and not self.end_answered():
            self._writer.results.respond(
                self._writer.encoder.encode(self.record, error_context(error)), 0
            )

    def end_answered(self) -> bool:
        """End a closed request that needs no error: its only response has been sent; returns whether it was."""
        if self._writer.identity.decoupled or self.sender is None or not self.sender._sent:
            return False
        last = self._writer.encoder.encode_empty(self.record.ticket, ResponseFlag.EMPTY)
        self._writer.results.respond(last, 0)
        return True


class _OnTheirWay:
    """The sizes of the last responses that were sent, and the number of all."""

    __slots__ = ("_sent", "_sizes")

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=_MOST_RESPONSES)
        self._sent = 0

    def add(self, size: int) -> None:
        """Add a response."""
        self._sizes.append(size)
        self._sent += 1

    def open(self, arrived: int) -> bool:
        """Return whether another one may follow, once so many have arrived."""
        left = (self._sent - arrived) & _U32
        sizes = self._sizes
        while sizes and len(sizes) > left:
            sizes.popleft()
        return left < _MOST_RESPONSES and sum(sizes) < _MOST_BYTES


class StubResponseStream:
    """Response stream of one request.

    The request keeps its ticket, and so its cells in the control page, until the final record.
    """

    def __init__(self, writer: ResponseWriter, record: Record) -> None:
        self._writer = writer
        self._record = record
        # What the server has not received yet, and what the client has not read.
        self._unreceived = _OnTheirWay()
        self._unread = _OnTheirWay()
        self._closed = self._was_cancelled = False
        # What the request ends with in place of its last response.
        self._failure: BridgeError | None = None
        self._lock = threading.Lock()
        self.decoupled = writer.identity.decoupled

    def waits(self, response: InferenceResponse, for_client: bool) -> Iterator[float]:
        """Yield seconds to wait until the server has enough responses for this one to be sent.

        ``for_client``: until the client has read enough, too. Polls cells in shared memory with
        increasing pauses: such waits are rare. Once the model is to end, nothing waits for its
        clients: the response will not be sent.
        """
        size = sum([(t._device_bytes or t._payload()).nbytes for t in response._tensors])
        pause = _FIRST_PAUSE
        while not (self._closed or self._take_credit(size, for_client) or self._abandoned()):
            if for_client and self._writer.control.cancelled[self._record.ticket] == GIVEN_UP:
                self._failure = _CUT
                return
            yield pause
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close the stream and stop waiting for credit: the ticket is reused for another request."""
        self.end(self.cancelled())

    def end(self, was_cancelled: bool) -> None:
        """Close the stream of a request that is answered already."""
        self._was_cancelled = was_cancelled
        self._closed = True

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response, the end of the stream, or both; nothing once the stream is closed."""
        if self._closed:
            return
        unwanted = self._failure is not None or self._abandoned()
        if final:
            self.close()
        if response is not None and not unwanted:
            self._writer.send(self._record, response, final)
        elif final:
            self._end()

    def _end(self) -> None:
        """End the request without a response."""
        encoder = self._writer.encoder
        if self._failure is None:
            last = encoder.encode_empty(self._record.ticket, ResponseFlag.EMPTY)
        else:
            last = encoder.encode(self._record, error_context(self._failure))
        self._writer.results.respond(last, 0)

    def cancelled(self) -> bool:
        """Return whether the client no longer waits or asked to stop; once closed, whether it had."""
        if self._closed:
            return self._was_cancelled
        return self._writer.control.cancelled[self._record.ticket] != 0

    def _abandoned(self) -> bool:
        """Return whether responses would be discarded."""
        return self._writer.control.cancelled[self._record.ticket] == ABANDONED

    def sender_dropped(self, sent: int, why: Exception = _DROPPED) -> None:
        """End the request, since the model has deleted its sender; with an error if it has no response."""
        if self._closed:
            return
        self.close()
        if not sent and self._failure is None:
            known = isinstance(why, BridgeError)
            self._failure = why if known else self._writer.identity.failure(why)  # type: ignore[assignment]
        try:
            self._end()
        except ChannelClosed:
            # The server is gone.
            pass

    def _take_credit(self, size: int, for_client: bool) -> bool:
        control, ticket = self._writer.control, self._record.ticket
        with self._lock:
            if not self._unreceived.open(control.received[ticket]):
                return False
            # A rescheduled request may have unread responses from before: the server then begins to
            # count below zero.
            if for_client and not self._unread.open(control.passed_on[ticket]):
                return False
            self._unreceived.add(size)
            self._unread.add(size)
        return True
