"""Sends the calls of a model's threads and coroutines: in order, soon, and many in one message."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubridge.stub.bls.calls import Call
from gpubridge.transport.calls import CallKind, encode_calls
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.context import LONG_TEXT
from gpubridge.transport.messages import control_message

if TYPE_CHECKING:
    import asyncio

_SENT_TOGETHER = 64
"""Calls of coroutines are sent at the latest once this many are queued."""


class Outbox:
    """Sends messages to the server; owns the calls that are not sent yet.

    The first call of a turn of an event loop is sent at once. Others of the same turn are gathered
    and sent together at its end. A thread sends them earlier where the turn goes on without the
    interpreter, because the coroutine waits for something else.

    Finalizers of calls run at any point of any thread, so they take no lock here.

    - ``unsent``: the calls that are not sent yet, each with its record and its batch.
    - ``direct``: the channel's descriptor while none are, nor are being sent: others may send a call
      there at once. Else None.
    - ``lose``: ends a call of which it is unknown whether it was sent, and why.
    """

    def __init__(self, channel: Channel, lose: Callable[[Call, str], None]) -> None:
        self._channel = channel
        self._lose = lose
        # Reentrant: a signal handler or a finalizer of the model may call, too.
        self._lock = threading.RLock()
        self.unsent: list[tuple[Call, bytes, int]] = []
        self._flushing = False
        self.direct: int | None = channel.fileno()
        self._turn = threading.local()
        self._gathered: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def add(
        self,
        call: Call,
        record: bytes,
        batch: int,
        loop: asyncio.AbstractEventLoop | None,
        at_once: bool,
    ) -> None:
        """Send a call that is made for the requests of a batch, now or with others of this turn.

        ``loop``: the running event loop, if a coroutine calls. Raises ChannelClosed.
        """
        with self._lock:
            long = len(record) > LONG_TEXT
            if long:
                # The server reads a long text only where its call is alone in a message.
                self._flush()
            self.direct = None
            self.unsent.append((call, record, batch))
            if (
                loop is None
                or long
                or at_once
                or len(self.unsent) >= _SENT_TOGETHER
                or self._begins_turn(loop)
            ):
                self._flush()
            elif len(self.unsent) == 1:
                self._wake_sender()

    def flush(self) -> None:
        """Send the calls that are gathered; raises ChannelClosed."""
        if self.unsent:
            with self._lock:
                self._flush()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send another message, without a lock; raises ChannelClosed."""
        while not self._channel.send(message, fds):
            writable = select.poll()
            writable.register(self._channel.fileno(), select.POLLOUT)
            writable.poll()

    def drop(self, call: Call) -> None:
        """Cancel a call whose responses nobody takes; without a lock, for finalizers."""
        call.dropped = True
        if call.sent:
            self._cancel(call)

    def close(self) -> None:
        """End the thread; the channel is going to be closed."""
        self._gathered.put(False)
        self.disown()

    def disown(self) -> None:
        """Have nothing sent at once any more: the channel is going to be closed."""
        self._flushing, self.direct = True, None

    def _flush(self) -> None:
        taken, self.unsent = self.unsent, []
        if not taken:
            return
        # Of a signal's handler, whose calls are sent meanwhile.
        outer, self._flushing = self._flushing, True
        try:
            calls, records, batches = zip(*taken)
            self.send(encode_calls(records, batches))
        except BaseException as error:
            # Of a signal's handler: sending them again may be once too often. Or the server is gone,
            # and who reads may have learned that before these calls were made.
            for call, _, _ in taken:
                self._lose(call, f"interrupted while it was sent, by {error!r}; call again")
            raise
        finally:
            self._flushing = outer
            if not (outer or self.unsent):
                self.direct = self._channel.fileno()
        for call in calls:
            call.sent = True
            if call.dropped:
                # Before this, so that its finalizer has not told the server.
                self._cancel(call)

    def _cancel(self, call: Any) -> None:
        try:
            self.send(control_message(CallKind.CANCEL, call=call.number))
        except ChannelClosed:
            # The process ends.
            pass

    def _begins_turn(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this is the first call of a turn of this thread's loop."""
        if getattr(self._turn, "loop", None) is loop:
            return False
        loop.call_soon(self._end_turn)
        self._turn.loop = loop
        return True

    def _end_turn(self) -> None:
        self._turn.loop = None
        self._flush_unless_closed()

    def _wake_sender(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._run, name="gpubridge-calls", daemon=True)
            try:
                self._sender.start()
            except RuntimeError:
                # The system allows no more threads.
                self._sender = None
                self._flush()
                return
        self._gathered.put(True)

    def _run(self) -> None:
        while self._gathered.get():
            self._flush_unless_closed()

    def _flush_unless_closed(self) -> None:
        try:
            self.flush()
        except ChannelClosed:
            # The calls have ended with it.
            pass
