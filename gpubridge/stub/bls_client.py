"""The model's calls of other models: sent from any thread, their responses told to who waits.

There is no thread that reads: of those that wait, one reads for all. So an answer costs its caller
one wake-up, as if it were alone.
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
from gpubridge.stub.bls_records import BlsRecords, CallResponse, error_code
from gpubridge.stub.outputs import OutputMemory
from gpubridge.stub.questions import Question, Waiting
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
from gpubridge.transport.short_waits import ShortWaits

if TYPE_CHECKING:
    import asyncio

    from gpubridge.stub.device.memory import StubDevice
    from gpubridge.stub.device.placement import DevicePlacement

_SENT_TOGETHER = 64
"""So many calls of coroutines are sent without waiting for the end of the loop's turn."""
_TAKEN_TOGETHER = 16
"""The server is told after so many responses that they were taken: it lets 64 be under way."""


class Call:
    """One call: the responses that have come, and who waits for them."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_decoupled",
        "_future",
        "_over",
        "_responses",
        "_taken",
        "event",
        "inputs",
        "number",
    )

    def __init__(self, client: BlsClient, number: int, inputs: Any, decoupled: bool) -> None:
        self._client = client
        self.number = number
        # Their memory is lent by reference: it must stay what it is until the answer.
        self.inputs = inputs
        # Made by the one who waits for it: most callers read for themselves.
        self.event: threading.Event | None = None
        self._decoupled = decoupled
        self._responses: deque[InferenceResponse] = deque()
        self._future: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._over = False
        self._taken = 0

    @property
    def ready(self) -> bool:
        """Return whether there is a response, or never will be another."""
        return bool(self._responses) or self._over

    def next(self) -> InferenceResponse | None:
        """Wait for the next response; None when there are no more."""
        if not self.ready:
            self._client.wait(self)
        if not self._responses:
            return None
        response = self._responses.popleft()
        if self._decoupled and not self._over:
            self._taken += 1
            if self._taken == _TAKEN_TOGETHER:
                self._client.tell(CallKind.TAKEN, call=self.number, responses=self._taken)
                self._taken = 0
        return response

    def when_ready(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what is done when :meth:`next` need not wait; in a coroutine of ``loop``."""
        future: asyncio.Future[None] = loop.create_future()
        self._future = loop, future
        if self.ready:
            future.set_result(None)
        else:
            self._client.read_on(loop)
        return future

    def cancel(self) -> None:
        """Tell the called model to stop; what it says to that is read like any response."""
        if not self._over:
            self._client.tell(CallKind.CANCEL, call=self.number, still_read=True)

    def deliver(self, response: InferenceResponse | None, over: bool) -> None:
        """Take a response, the end, or both."""
        if response is not None:
            self._responses.append(response)
        if over:
            self._over = True
            self.inputs = None
        if self.event is not None:
            self.event.set()
        if self._future is not None:
            loop, future = self._future
            loop.call_soon_threadsafe(_done, future)

    def __del__(self) -> None:
        if not self._over:
            # Nobody will take what comes.
            self._client.abandon(self.number)


class BlsClient:
    """Sends calls and takes their responses; owns the call channel.

    - ``channel``: does not block.
    - ``lent``: the lease bytes of memory that is lent to this stub.
    - ``outputs``: where inputs of calls go that are not in shared memory already.
    - ``requests``: says whether the model has one request at a time.
    - ``awake_ns``: for how long to stay awake for an answer.
    """

    def __init__(
        self,
        channel: Channel,
        lent: memoryview,
        outputs: OutputMemory,
        requests: ShortWaits,
        awake_ns: int,
    ) -> None:
        self._channel = channel
        self._requests = requests
        self._answers = ShortWaits(awake_ns)
        self._awake_ns = awake_ns
        self._borrowed = BorrowedMemory(lent)
        self._records = BlsRecords(self._borrowed, outputs)
        self._numbers = itertools.count(1)
        # Those that somebody still holds: who drops a call or its iterator wants no more responses.
        self._calls: dict[int, weakref.ref[Call]] = {}
        self._questions: dict[int, Question] = {}
        self._unsent: deque[bytes] = deque()
        self._reading = threading.Lock()
        self._waiting: set[Waiting] = set()
        self._readable = select.poll()
        self._readable.register(channel.fileno(), select.POLLIN)
        self._process = os.getpid()
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._device: StubDevice | None = None

    def use_device(self, device: StubDevice, placement: DevicePlacement) -> None:
        """Send and take tensors in the memory of a GPU, too."""
        self._device = device
        self._records.use_device(device, placement)
        device.know_own_in(self._borrowed)

    # -- what models ask ---------------------------------------------------------------------------

    def call(
        self,
        request: InferenceRequest,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Call:
        """Send a request to another model: now, or with others at the end of this turn of ``loop``.

        One with a time limit is sent now, since that counts from when the server has it.

        Raises ChannelClosed when the server is gone.
        """
        number = next(self._numbers) & 0xFFFF_FFFF
        call = Call(self, number, list(request._inputs), decoupled)
        try:
            # Before there is memory for it, which the server is told of.
            _check_length(len(request._model_name))
            record = self._records.encode(number, request, decoupled)
            if len(record) > LONGEST_CONTROL:
                # The server does not look at long parameters.
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
            self._pass(encode_records(CallKind.CALL, (record,)))
            return call
        self._unsent.append(record)
        if loop is None or request._timeout or len(self._unsent) >= _SENT_TOGETHER:
            self._send_calls()
        elif len(self._unsent) == 1:
            loop.call_soon(self._send_calls)
        return call

    def tell(self, kind: int, **fields: Any) -> None:
        """Send a message of a rare kind."""
        self._send(control_message(kind, **fields))

    def ask(self, about: str, fds: Sequence[int] = (), **fields: Any) -> Question:
        """Ask the server something, and wait for the answer; any thread may, at any time.

        Raises BridgeError: what the server answers instead, or that it is gone; INVALID_ARG for names
        and texts that are too long.
        """
        if os.getpid() != self._process:
            raise BridgeError(
                "expected the process that the server has started, got a child that the model forked; "
                "ask in the model's own process"
            )
        number = next(self._numbers)
        question = self._questions[number] = Question()
        try:
            message = control_message(CallKind.ASK, question=number, about=about, **fields)
            try:
                _check_length(len(message))
            except ValueError as error:
                raise BridgeError(str(error), ErrorCode.INVALID_ARG) from error
            self._send(message, fds)
            self.wait(question)
        finally:
            self._questions.pop(number, None)
        question.check()
        return question

    def abandon(self, number: int) -> None:
        """Cancel a call whose responses are no longer wanted; from any thread, at any time."""
        if self._calls.pop(number, None) is not None:
            try:
                self.tell(CallKind.CANCEL, call=number)
            except ChannelClosed:
                # The process ends.
                pass

    def _send_calls(self) -> None:
        """Send the calls that wait for it, in one message."""
        records = []
        while self._unsent:
            # One by one: other threads add to it.
            records.append(self._unsent.popleft())
        if records:
            self._pass(encode_records(CallKind.CALL, records))

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        self._send_calls()
        self._pass(message, fds)

    def _pass(self, message: bytes, fds: Sequence[int] = ()) -> None:
        while not self._channel.send(message, fds):
            writable = select.poll()
            writable.register(self._channel.fileno(), select.POLLOUT)
            writable.poll()

    # -- reading -----------------------------------------------------------------------------------

    def wait(self, call: Waiting) -> None:
        """Wait until a call or question is ready: read for all who wait, or let another do that."""
        self._waiting.add(call)
        try:
            if self._unsent:
                self._send_calls()
            while not call.ready:
                if not self._reading.acquire(blocking=False):
                    if call.event is None:
                        # Who reads may have ended before it could see this: look again first.
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
                # Who waits still may have to read now.
                self._wake_one()

    def _read_until(self, call: Waiting) -> None:
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
        """Read whenever there is something, as long as the loop runs."""
        if loop not in self._loops:
            self._loops = {each for each in self._loops if not each.is_closed()} | {loop}
            loop.add_reader(self._channel.fileno(), self._pump)

    def catch_up(self) -> None:
        """Take what has come while nobody waits: memory that goes."""
        # Who reads already takes all; and two threads must not ask one poll object at once.
        while self._reading.acquire(blocking=False):
            try:
                if not self._readable.poll(0):
                    return
                self._receive()
            finally:
                self._reading.release()
                self._wake_one()

    def _pump(self) -> None:
        """Take one message, unless another thread reads."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._receive()
        finally:
            self._reading.release()
            # It may have found nobody to read for it but this loop, which may end.
            self._wake_one()

    def _wake_one(self) -> None:
        for waiting in list(self._waiting)[:1]:
            if waiting.event is not None:
                waiting.event.set()

    def _receive(self) -> None:
        """Take one message, if there is one."""
        try:
            message, fds = self._channel.receive()
        except BlockingIOError:
            return
        kind = message[0]
        if kind == CallKind.CALL_RESPONSES:
            for response in self._records.decode(message):
                self._deliver(response)
        elif kind == CallKind.REGION:
            fields = decode_control(message)
            self._borrowed.announce(fields["region"], fds.pop(), fields["size"])
        elif kind == CallKind.DEVICE_REGION:
            self._take_device_region(decode_control(message), fds)
        elif kind == CallKind.DROP_REGION:
            self._borrowed.drop(decode_control(message)["region"])
        elif kind == CallKind.ANSWER:
            fields = decode_control(message)
            question = self._questions.get(fields["question"])
            if question is None:
                close_all(fds)
            else:
                question.deliver(fields, fds)
        else:
            raise MalformedMessage(f"message of unknown kind {kind} from the server")

    def _take_device_region(self, fields: dict[str, Any], fds: list[int]) -> None:
        """Begin to open device memory; an answer that lies in what cannot be opened is an error."""
        if self._device is None:
            close_all(fds)
        else:
            self._borrowed.know(self._device.regions.announce(fields, fds))

    def _deliver(self, taken: CallResponse) -> None:
        number, flags, response = taken
        over = not flags & ResponseFlag.OPEN
        held = self._calls.pop(number, None) if over else self._calls.get(number)
        call = None if held is None else held()
        if call is not None:
            if response is None and over:
                # The last response may be empty: so it is at Triton.
                response = InferenceResponse([])
            call.deliver(response, over)


def _check_length(nbytes: int) -> None:
    """Raise ValueError where the server would not read names, ids and texts of so many bytes."""
    if nbytes > LONGEST_CONTROL:
        raise ValueError(
            f"expected at most {LONGEST_CONTROL} bytes of names and texts, got {nbytes}"
        )


def _refused(call: Call, request: InferenceRequest, why: str, code: Any) -> Call:
    """Answer a call that cannot be sent."""
    text = f"Model {request._model_name} - Error when running inference: {why}"
    call.deliver(InferenceResponse([], TritonError(text, code)), over=True)
    return call


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
