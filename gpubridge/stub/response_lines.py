"""The responses that a model sends by itself, from any thread, at any time until the last."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Logger, Tensor, TritonModelException
from gpubridge.pb_utils.response_sender import InferenceResponseSender
from gpubridge.stub.answers import AnswerEncoder, ModelIdentity, error_context
from gpubridge.stub.outputs import OutputMemory
from gpubridge.stub.results import ResultSender
from gpubridge.tensor.native import NativeStubLoop
from gpubridge.transport.channel import ChannelClosed
from gpubridge.transport.control import NOBODY_WAITS, ControlPage
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    import numpy as np

    from gpubridge.pb_utils.output_form import OutputForm

_WAITING_RESPONSES = 64
_WAITING_BYTES = 16 << 20
_U32 = 0xFFFF_FFFF
_FIRST_LOOK = 0.0002
_making = threading.Lock()
_LONGEST_LOOK = 0.01


class ResponseDesk:
    """State that the response streams of all requests share; ``loop`` sends plain responses."""

    __slots__ = ("answers", "control", "identity", "loop", "outputs", "results")

    def __init__(
        self,
        control: ControlPage,
        outputs: OutputMemory,
        results: ResultSender,
        answers: AnswerEncoder,
        identity: ModelIdentity,
    ) -> None:
        self.control = control
        self.outputs = outputs
        self.results = results
        self.answers = answers
        self.identity = identity
        self.loop: NativeStubLoop | None = None

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
        answer = self.answers.answer(record, response, 0 if final else ResponseFlag.OPEN)
        self.results.respond(answer, self.outputs.take_copied())


class RequestOrigin:
    """Connection of a received request: its cancellation, its outputs and its responses."""

    # ``over`` is only there once the request is: most requests are gone with their batch.
    __slots__ = ("_desk", "over", "record", "rescheduled", "sender")
    over: bool

    def __init__(self, desk: ResponseDesk, record: Record) -> None:
        self._desk = desk
        self.record = record
        self.rescheduled = False
        self.sender: InferenceResponseSender | None = None

    def cancelled(self) -> bool:
        """Tell whether nobody waits for the answer any more; of a request that is over, whether so it was."""
        if self.sender is not None and self.sender._closed:
            return self.sender.is_cancelled()
        if hasattr(self, "over"):
            return self.over
        return self._desk.control.cancelled[self.record.ticket] != 0

    def response_sender(self) -> InferenceResponseSender:
        """Return the request's sender, the same each time."""
        if self.sender is None:
            with _making:
                # Of two threads that ask at once, one makes it.
                if self.sender is None:
                    self.sender = InferenceResponseSender._on(_Line(self._desk, self.record))
        return self.sender

    def output(
        self, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in the place where it is wanted, or will be sent from."""
        self._check_open(name)
        placement = self._desk.answers.placement
        return placement.allocate(self.record, name, datatype, shape, dtype)

    def output_on_device(self, form: OutputForm) -> Tensor:
        """Make an output tensor on the stub's GPU, in the place where it is wanted if that is there."""
        self._check_open(form.name)
        return self._desk.answers.placement.allocate_on_device(self.record, form)

    def _check_open(self, name: str) -> None:
        if hasattr(self, "over") or (self.sender is not None and self.sender._closed):
            raise TritonModelException(
                f"output '{name}': expected a request that is not answered yet, got one that is: the "
                "place where its outputs go may be another request's"
            )

    def reschedule(self, wanted: bool) -> None:
        """Note whether the model wants to get the request again."""
        if wanted and not self._desk.identity.iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model "
                "is not configured to handle such a flag. Set 'iterative_sequence: true' in its "
                "sequence_batching."
            )
        self.rescheduled = wanted

    def comes_back(self) -> bool:
        """Tell, once its batch has ended, whether the request does; its sender is closed then."""
        if not self.rescheduled:
            return False
        if self.close():
            return True
        Logger.log_warn(
            "a request was released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE after its final "
            "response was sent: it is over"
        )
        return False

    def take_back(self) -> bool:
        """Close the sender if it has sent nothing yet; returns whether that was so."""
        return self.sender is None or self.sender._close(unless_sent=True)

    def close(self) -> bool:
        """Close the sender; returns whether the request has no final response yet."""
        return self.sender is None or self.sender._close()

    def fail(self, error: BridgeError) -> None:
        """Give the request an error as its end, if it has none yet; from any thread."""
        if self.close():
            self._desk.results.respond(
                self._desk.answers.answer(self.record, error_context(error)), 0
            )


class DecoupledOrigin(RequestOrigin):
    """The origin of a request that is open until its model has sent the last response.

    Where the model drops the request without ever having taken its sender, nobody could.
    """

    __slots__ = ("_closed",)

    def __init__(self, desk: ResponseDesk, record: Record) -> None:
        super().__init__(desk, record)
        self._closed = False

    def close(self) -> bool:
        """Close the sender; returns whether the request has no final response yet."""
        if self.sender is not None:
            return super().close()
        was_open = not self._closed
        self._closed = True
        return was_open

    def __del__(self) -> None:
        if self.sender is None and not self._closed:
            _Line(self._desk, self.record).let_go(0)


class _Line:
    """Response stream of one request.

    The ticket stays this request's until the final record, so its cells in the control page do, too.
    """

    def __init__(self, desk: ResponseDesk, record: Record) -> None:
        self._desk = desk
        self._record = record
        # The sizes of the responses that the server has not passed on, and how many were sent.
        self._on_the_way: deque[int] = deque()
        self._sent = 0
        self._closed = self._was_cancelled = False
        self._lock = threading.Lock()
        self.decoupled = desk.identity.decoupled

    def wait_for_room(self, response: InferenceResponse) -> None:
        """Wait until the server has passed on so much that a response may go to it.

        Looked at again and again: this is a cell in shared memory, and a client that makes a model
        wait is rare.
        """
        size = sum([(t._device_bytes or t._payload()).nbytes for t in response._tensors])
        pause = _FIRST_LOOK
        while not (self._closed or self._has_room(size) or self._abandoned()):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)

    def close(self) -> None:
        """Let nobody wait for room any more: the ticket will be another request's."""
        self._was_cancelled = self.cancelled()
        self._closed = True

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        """Send a response, its end, or both."""
        desk = self._desk
        abandoned = self._abandoned()
        if final:
            self.close()
        if response is None or abandoned:
            if final:
                desk.results.respond(
                    desk.answers.nothing(self._record.ticket, ResponseFlag.EMPTY), 0
                )
            return
        desk.send(self._record, response, final)

    def cancelled(self) -> bool:
        """Tell whether the client no longer waits, or has asked to stop; later, whether it had."""
        if self._closed:
            return self._was_cancelled
        return self._desk.control.cancelled[self._record.ticket] != 0

    def _abandoned(self) -> bool:
        """Tell whether nobody reads what is sent."""
        return self._desk.control.cancelled[self._record.ticket] == NOBODY_WAITS

    def let_go(self, sent: int) -> None:
        """End the request: the model cannot any more."""
        flags = ResponseFlag.EMPTY
        desk = self._desk
        try:
            if sent:
                desk.results.respond(desk.answers.nothing(self._record.ticket, flags), 0)
            else:
                error = BridgeError(
                    "the model dropped this request without sending a response; get its response "
                    "sender and send one, or the final flag",
                    ErrorCode.INTERNAL,
                )
                desk.results.respond(desk.answers.answer(self._record, error_context(error)), 0)
        except ChannelClosed:
            # The process ends: nobody is left to tell.
            pass

    def _has_room(self, size: int) -> bool:
        waiting = self._on_the_way
        with self._lock:
            # A request that came back may have responses on the way from before: the server begins
            # to count below zero then.
            left = (self._sent - self._desk.control.passed_on[self._record.ticket]) & _U32
            while len(waiting) > left:
                waiting.popleft()
            if left >= _WAITING_RESPONSES or sum(waiting) > _WAITING_BYTES:
                return False
            waiting.append(size)
            self._sent += 1
        return True
