"""Decides which thread or event loop reads the call channel.

There is no reader thread: one of the waiting threads reads for all, so that a response costs its
caller one wake-up.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from gpubridge.stub.bls.calls import Call, Outcome
from gpubridge.tensor.native import native
from gpubridge.transport.channel import Channel, ChannelClosed, DescriptorsLost
from gpubridge.transport.wait_predictor import WaitPredictor, wait_predictor

if TYPE_CHECKING:
    import asyncio

    from gpubridge.stub.bls.outbox import Outbox
    from gpubridge.stub.bls.records import CallResponse


class ChannelReader:
    """Reads a channel in one of the threads that wait, or on event loops that have nothing else to do.

    - ``take``: handles a message and its descriptors.
    - ``lost``: handles a message whose descriptors were lost.
    - ``ended``: called when the other side is gone.
    - ``requests``: the wait predictor of requests; tells whether the model has one at a time.
    - ``awake_ns``: how long to poll for a message.

    ``compiled`` reads messages in compiled code, if there is any.
    """

    def __init__(
        self,
        channel: Channel,
        take: Callable[[bytes, list[int]], None],
        lost: Callable[[DescriptorsLost], None],
        ended: Callable[[], None],
        requests: WaitPredictor,
        awake_ns: int,
    ) -> None:
        self._channel = channel
        self._descriptor = channel.fileno()
        self._take = take
        self._lost = lost
        self._ended = ended
        self._requests = requests
        self._answers = wait_predictor(awake_ns)
        self._awake_ns = awake_ns
        # Reentrant: a signal handler of the model may wait while its thread reads.
        self._reading = threading.RLock()
        # Threads that leave reading to another one; in the order in which they came.
        self._waiting: dict[threading.Event, None] = {}
        self._readable = select.poll()
        self._readable.register(self._descriptor, select.POLLIN)
        self._closed = False
        # Event loops that read; the model's, which may drop them without closing them.
        self._loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        # Gives that of them which asked last, if it is there still.
        self._latest: Callable[[], asyncio.AbstractEventLoop | None] = _none
        self.compiled: Any = None

    def use(
        self,
        responses: Any,
        outbox: Outbox,
        calls: dict[int, Call],
        deliver: Callable[[CallResponse], None],
    ) -> None:
        """Read by compiled code from now on, if there is a compiled reader of responses.

        - ``outbox``: the calls that are not sent yet.
        - ``calls``: those under way, by their numbers.
        - ``deliver``: gives one of them a response for which it is not only waited in `wait`.
        """
        compiled = native()
        if responses is None or compiled is None:
            return
        handlers = deliver, self._receive_other, self._pass_on
        state = outbox, calls, self._reading, self._waiting, self._requests, self._answers
        self.compiled = compiled.CallReader(
            responses, Call, handlers, state, self._descriptor, self._awake_ns
        )

    def drop_compiled(self) -> None:
        """Go on in Python, without the compiled object, which refers to this one."""
        compiled, self.compiled = self.compiled, None
        if compiled is not None:
            compiled.close()

    def close(self) -> None:
        """Stop event loops from reading; before the channel is closed."""
        self._closed = True
        self.drop_compiled()
        for loop in list(self._loops):
            # One that is closed reads no more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(loop.remove_reader, self._descriptor)

    def wait(self, outcome: Outcome) -> None:
        """Wait until something is ready: read for all who wait, or let another thread."""
        waiter: threading.Event | None = None
        try:
            while True:
                if self._reading.acquire(blocking=False):
                    try:
                        self._read_until(outcome)
                        return
                    finally:
                        self._reading.release()
                if outcome.ended or outcome.ready:
                    return
                if waiter is None:
                    # The reader may have stopped before it saw this: look again before waiting.
                    waiter = threading.Event()
                    outcome.add_waiter(waiter)
                    self._waiting[waiter] = None
                else:
                    waiter.wait()
                    waiter.clear()
        finally:
            if waiter is not None:
                self._waiting.pop(waiter, None)
                outcome.remove_waiter(waiter)
            if self._waiting:
                self._pass_on()

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from a running event loop whenever the channel is readable."""
        if self._latest() is loop or self._closed:
            return
        self._latest = ref(loop)
        if loop in self._loops:
            return
        self._loops.add(loop)
        loop.add_reader(self._descriptor, self._read_one, loop)

    def catch_up(self) -> None:
        """Handle messages that arrived while no thread waits, such as dropped regions."""
        # A reader handles all messages; and two threads must not use one poll object at once.
        while not self._closed and self._reading.acquire(blocking=False):
            try:
                if not self._readable.poll(0):
                    return
                self._receive()
            finally:
                self._reading.release()
                self._pass_on()

    def _read_until(self, outcome: Outcome) -> None:
        if self.compiled is not None:
            self.compiled.read_until(outcome)
            return
        if outcome.ended or outcome.ready:
            return
        answers = self._answers
        answers.alone = self._requests.alone
        awake = answers.begin(time.monotonic_ns())
        while not (outcome.ended or outcome.ready):
            if awake:
                awake = self._channel.poll(self._awake_ns, answers)
            if not awake:
                self._readable.poll()
            self._receive()
        answers.end(time.monotonic_ns())

    def _read_one(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle one message, unless another thread reads."""
        if self._closed:
            loop.remove_reader(self._descriptor)
        elif self._reading.acquire(blocking=False):
            try:
                self._receive()
            finally:
                self._reading.release()
                # A waiter may have left reading to this loop, which may end.
                self._pass_on()

    def _receive(self) -> None:
        """Handle one message, if there is one."""
        if self.compiled is not None:
            self.compiled.receive()
        else:
            self._handle(self._channel.receive)

    def _receive_other(self, message: bytes, fds: list[int], cut: bool) -> None:
        """Handle a message that compiled code does not, or the end of the channel."""
        self._handle(partial(self._channel.whole, message, fds, cut))

    def _handle(self, receive: Callable[[], tuple[bytes, list[int]]]) -> None:
        try:
            message, fds = receive()
        except BlockingIOError:
            return
        except ChannelClosed:
            self._closed = True
            self._ended()
            return
        except DescriptorsLost as error:
            self._lost(error)
            return
        self._take(message, fds)

    def _pass_on(self) -> None:
        """Have another waiting thread read: this one stops."""
        if self._waiting:
            for waiter in list(self._waiting)[:1]:
                waiter.set()


def _none() -> None:
    """Stand for a reference to no loop."""
