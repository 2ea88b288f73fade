"""Client of the call channel: a model's calls of other models, and control requests to the server.

There is no reader thread: one of the waiting threads reads for all, so that a response costs its
caller one wake-up.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceRequest, InferenceResponse, TritonError
from gpubridge.stub.bls.records import BlsRecords, CallResponse, error_code
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.transport.calls import CallKind, encode_records
from gpubridge.transport.channel import Channel, ChannelClosed, MalformedMessage, close_all
from gpubridge.transport.context import LONG_TEXT
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import (
    LONGEST_CONTROL,
    ResponseFlag,
    control_message,
    decode_control,
)
from gpubridge.transport.wait_predictor import WaitPredictor

if TYPE_CHECKING:
    import asyncio

    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.placement import DevicePlacement

_SENT_TOGETHER = 64
"""Calls of coroutines are sent once this many are queued, or at the end of the loop's turn."""
_TAKEN_TOGETHER = 16
"""The server gets credit for this many taken responses at once; it sends 64 without credit."""


class Call:
    """One call: its received responses, and the thread or coroutine that waits for more."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_decoupled",
        "_ended",
        "_future",
        "_responses",
        "_taken",
        "event",
        "inputs",
        "number",
    )

    def __init__(self, client: BlsClient, number: int, inputs: Any, decoupled: bool) -> None:
        self._client = client
        self.number = number
        # Their memory is passed by reference and must not change until the final response.
        self.inputs = inputs
        # Made when another thread reads; most callers read for themselves.
        self.event: threading.Event | None = None
        self._decoupled = decoupled
        self._responses: deque[InferenceResponse] = deque()
        self._future: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._ended = False
        self._taken = 0

    @property
    def ready(self) -> bool:
        """Return whether `next` need not wait: there is a response, or there will be none."""
        return bool(self._responses) or self._ended

    def next(self) -> InferenceResponse | None:
        """Wait for the next response; None when there are no more."""
        if not self.ready:
            self._client.wait(self)
        if not self._responses:
            return None
        response = self._responses.popleft()
        if self._decoupled and not self._ended:
            self._taken += 1
            if self._taken == _TAKEN_TOGETHER:
                self._client.tell(CallKind.TAKEN, call=self.number, responses=self._taken)
                self._taken = 0
        return response

    def when_ready(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future of ``loop`` that is done once :meth:`next` need not wait."""
        future: asyncio.Future[None] = loop.create_future()
        self._future = loop, future
        if self.ready:
            future.set_result(None)
        else:
            self._client.read_on(loop)
        return future

    def cancel(self) -> None:
        """Ask the called model to stop; responses that it still sends are received as usual."""
        if not self._ended:
            self._client.tell(CallKind.CANCEL, call=self.number, still_read=True)

    def deliver(self, response: InferenceResponse | None, ended: bool) -> None:
        """Add a received response, the end of the call, or both."""
        if response is not None:
            self._responses.append(response)
        if ended:
            self._ended = True
            self.inputs = None
        if self.event is not None:
            self.event.set()
        if self._future is not None:
            loop, future = self._future
            loop.call_soon_threadsafe(_done, future)

    def __del__(self) -> None:
        if not self._ended:
            # Further responses would be discarded.
            self._client.abandon(self.number)


class ControlRequest:
    """A control request to the server, and its answer.

    - ``answer``: the fields of the answer, once received.
    - ``fds``: the descriptors received with it, which the requester owns.
    """

    __slots__ = ("answer", "event", "fds", "ready")

    def __init__(self) -> None:
        self.event: threading.Event | None = None
        self.answer: dict[str, Any] = {}
        self.fds: list[int] = []
        self.ready = False

    def deliver(self, answer: dict[str, Any], fds: list[int]) -> None:
        """Store the received answer."""
        self.answer = answer
        self.fds = fds
        self.ready = True
        if self.event is not None:
            self.event.set()

    def check(self) -> None:
        """Raise BridgeError if the answer is an error."""
        if "error" in self.answer:
            raise BridgeError(self.answer["error"], ErrorCode(self.answer["code"]))


class BlsClient:
    """Sends calls and receives their responses; owns the call channel.

    - ``channel``: a non-blocking channel.
    - ``lent``: the lease bytes of memory that is lent to this stub.
    - ``outputs``: memory for inputs of calls that are not in shared memory already.
    - ``requests``: the wait predictor of requests; tells whether the model has one at a time.
    - ``awake_ns``: how long to poll for a response.
    """

    def __init__(
        self,
        channel: Channel,
        lent: memoryview,
        outputs: OutputMemory,
        requests: WaitPredictor,
        awake_ns: int,
    ) -> None:
        self._channel = channel
        self._requests = requests
        self._answers = WaitPredictor(awake_ns)
        self._awake_ns = awake_ns
        self._records = BlsRecords(BorrowedMemory(lent), outputs)
        self._numbers = itertools.count(1)
        # Weak: a deleted call or iterator needs no more responses.
        self._calls: dict[int, weakref.ref[Call]] = {}
        self._control_requests: dict[int, ControlRequest] = {}
        self._unsent: deque[bytes] = deque()
        self._reading = threading.Lock()
        self._waiting: set[Call | ControlRequest] = set()
        self._readable = select.poll()
        self._readable.register(channel.fileno(), select.POLLIN)
        self._process = os.getpid()
        self._loops: set[asyncio.AbstractEventLoop] = set()

    def close(self) -> None:
        """Close the channel, and drop compiled objects, whose references no collector sees."""
        self._channel.close()
        self._records.drop_compiled()

    def use_device(self, device: StubDevice, placement: DevicePlacement) -> None:
        """Send and receive tensors in the memory of a GPU as well."""
        self._records.use_device(device, placement)

    # -- sending -----------------------------------------------------------------------------------

    def call(
        self,
        request: InferenceRequest,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Call:
        """Send a request to another model: now, or with others at the end of this turn of ``loop``.

        One with a timeout is sent now: the timeout counts from its arrival at the server.

        Raises ChannelClosed when the server is gone.
        """
        number = next(self._numbers) & 0xFFFF_FFFF
        call = Call(self, number, list(request._inputs), decoupled)
        try:
            # Before memory for its inputs is allocated, which is announced to the server.
            _check_length(len(request._model_name))
            record = self._records.encode(number, request, decoupled)
            if len(record) > LONGEST_CONTROL:
                # The server does not parse long parameters.
                _check_length(len(record) - len(request._parameters.encode(errors="replace")))
        except ValueError as error:
            text = (
                "the request's correlation id, flags, timeout or parameters cannot be passed on: "
                f"{error}"
            )
            return _refused(call, request, text, TritonError.INVALID_ARG)
        except ChannelClosed:
            raise
        except BridgeError as error:
            # There is no memory for its inputs.
            return _refused(call, request, error.message, error_code(error.code))
        self._calls[number] = weakref.ref(call)
        if len(record) > LONG_TEXT or (loop is None and not self._unsent):
            self._send_calls()
            self._send_blocking(encode_records(CallKind.CALL, (record,)))
            return call
        self._unsent.append(record)
        if loop is None or request._timeout or len(self._unsent) >= _SENT_TOGETHER:
            self._send_calls()
        elif len(self._unsent) == 1:
            loop.call_soon(self._send_calls)
        return call

    def tell(self, kind: int, **fields: Any) -> None:
        """Send a message with fields in JSON."""
        self._send(control_message(kind, **fields))

    def ask(self, about: str, fds: Sequence[int] = (), **fields: Any) -> ControlRequest:
        """Send a control request and wait for its answer; any thread may, at any time.

        Raises BridgeError: the server's error, or UNAVAILABLE if it is gone; INVALID_ARG for names and
        texts that are too long.
        """
        if os.getpid() != self._process:
            raise BridgeError(
                "expected the process that the server has started, got a child that the model forked; "
                "ask in the model's own process"
            )
        number = next(self._numbers)
        request = self._control_requests[number] = ControlRequest()
        try:
            message = control_message(CallKind.ASK, question=number, about=about, **fields)
            try:
                _check_length(len(message))
            except ValueError as error:
                raise BridgeError(str(error), ErrorCode.INVALID_ARG) from error
            self._send(message, fds)
            self.wait(request)
        finally:
            self._control_requests.pop(number, None)
        request.check()
        return request

    def abandon(self, number: int) -> None:
        """Cancel a call whose responses are discarded; any thread may, at any time."""
        if self._calls.pop(number, None) is not None:
            try:
                self.tell(CallKind.CANCEL, call=number)
            except ChannelClosed:
                # The process ends.
                pass

    def _send_calls(self) -> None:
        """Send the queued calls in one message."""
        records = []
        while self._unsent:
            # One by one: other threads append concurrently.
            records.append(self._unsent.popleft())
        if records:
            self._send_blocking(encode_records(CallKind.CALL, records))

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        self._send_calls()
        self._send_blocking(message, fds)

    def _send_blocking(self, message: bytes, fds: Sequence[int] = ()) -> None:
        while not self._channel.send(message, fds):
            writable = select.poll()
            writable.register(self._channel.fileno(), select.POLLOUT)
            writable.poll()

    # -- reading -----------------------------------------------------------------------------------

    def wait(self, call: Call | ControlRequest) -> None:
        """Wait until a call or control request is ready: read for all waiters, or let another thread."""
        self._waiting.add(call)
        try:
            if self._unsent:
                self._send_calls()
            while not call.ready:
                if not self._reading.acquire(blocking=False):
                    if call.event is None:
                        # The reader may have stopped before it saw the event: check again first.
                        call.event = threading.Event()
                        continue
                    call.event.wait()
                    call.event.clear()
                    continue
                try:
                    self._read_until(call)
                finally:
                    self._reading.release()
        finally:
            self._waiting.discard(call)
            if self._waiting:
                # Another waiter must become the reader.
                self._wake_one()

    def _read_until(self, call: Call | ControlRequest) -> None:
        answers = self._answers
        answers.alone = self._requests.alone
        awake = answers.begin(time.monotonic_ns())
        while not call.ready:
            if awake:
                awake = self._channel.poll(self._awake_ns, answers)
            if not awake:
                self._readable.poll()
            self._receive()
        answers.end(time.monotonic_ns())

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from the event loop whenever the channel is readable."""
        if loop not in self._loops:
            self._loops = {each for each in self._loops if not each.is_closed()} | {loop}
            loop.add_reader(self._channel.fileno(), self._read_one)

    def catch_up(self) -> None:
        """Handle messages that arrived while no thread waits, such as dropped regions."""
        # A reader handles all messages; and two threads must not use one poll object at once.
        while self._reading.acquire(blocking=False):
            try:
                if not self._readable.poll(0):
                    return
                self._receive()
            finally:
                self._reading.release()
                self._wake_one()

    def _read_one(self) -> None:
        """Handle one message, unless another thread reads."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._receive()
        finally:
            self._reading.release()
            # A waiter may have left reading to this loop, which may end.
            self._wake_one()

    def _wake_one(self) -> None:
        for waiting in list(self._waiting)[:1]:
            if waiting.event is not None:
                waiting.event.set()

    def _receive(self) -> None:
        """Handle one message, if there is one."""
        try:
            message, fds = self._channel.receive()
        except BlockingIOError:
            return
        kind = message[0]
        if kind == CallKind.CALL_RESPONSES:
            for response in self._records.decode(message):
                self._deliver(response)
        elif kind in (CallKind.REGION, CallKind.DEVICE_REGION, CallKind.DROP_REGION):
            self._records.map(kind, decode_control(message), fds)
        elif kind == CallKind.ANSWER:
            fields = decode_control(message)
            request = self._control_requests.get(fields["question"])
            if request is None:
                close_all(fds)
            else:
                request.deliver(fields, fds)
        else:
            raise MalformedMessage(f"message of unknown kind {kind} from the server")

    def _deliver(self, taken: CallResponse) -> None:
        number, flags, response = taken
        ended = not flags & ResponseFlag.OPEN
        held = self._calls.pop(number, None) if ended else self._calls.get(number)
        call = None if held is None else held()
        if call is not None:
            if response is None and ended:
                # As in Triton, the last response may be empty.
                response = InferenceResponse([])
            call.deliver(response, ended)


def _check_length(nbytes: int) -> None:
    """Raise ValueError for names, ids and texts that are longer than the server accepts."""
    if nbytes > LONGEST_CONTROL:
        raise ValueError(
            f"expected at most {LONGEST_CONTROL} bytes of names and texts, got {nbytes}"
        )


def _refused(call: Call, request: InferenceRequest, why: str, code: Any) -> Call:
    """Complete a call that cannot be sent with an error."""
    text = f"Model {request._model_name} - Error when running inference: {why}"
    call.deliver(InferenceResponse([], TritonError(text, code)), ended=True)
    return call


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
