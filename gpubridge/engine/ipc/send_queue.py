"""Send queue of a channel: sends at once, or queues messages while the channel is full."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError
from gpubridge.transport.channel import Channel, ChannelClosed, close_all, spill


class SendQueue:
    """Sends on a non-blocking channel; owns the queued messages.

    - ``workers``: copy messages of more than `HEAVY_BYTES` to shared memory.
    - ``on_closed``: called when the other side is gone.
    - ``block``: called with True when direct sends on the channel must stop, because messages are
      queued or this is closed, and with False when they may continue.
    """

    def __init__(
        self,
        channel: Channel,
        workers: Workers,
        on_closed: Callable[[], None],
        block: Callable[[bool], None] | None = None,
    ) -> None:
        self._channel = channel
        self._workers = workers
        self._on_closed = on_closed
        self._block = block or _ignore
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._open = True

    def send(
        self, message: bytes | Sequence[bytes | memoryview], fds: tuple[int, ...] = ()
    ) -> None:
        """Send a message, given whole or in pieces, and descriptors, which remain the caller's."""
        if not self._open:
            return
        pieces = (message,) if isinstance(message, bytes) else message
        long = sum(map(len, pieces)) > HEAVY_BYTES
        try:
            if not self._waiting and not long and self._channel.send(b"".join(pieces), fds):
                return
        except ChannelClosed:
            self._on_closed()
            return
        if not self._waiting:
            self._block(True)
        # Duplicated: the owner may close them before they are sent.
        waiting = _Waiting(None if long else b"".join(pieces), [os.dup(fd) for fd in fds])
        self._waiting.append(waiting)
        if long:
            self._workers.run(partial(spill, pieces), partial(self._spilled, waiting))
        elif len(self._waiting) == 1:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def close(self) -> None:
        """Stop sending; drop queued messages; idempotent."""
        if not self._open:
            return
        self._open = False
        # Break the cycle with the owner, so that memory is freed without the garbage collector.
        self._on_closed = _ignore
        self._block(True)
        self._block = _ignore
        self._loop.remove_writer(self._channel.fileno())
        while self._waiting:
            close_all(self._waiting.popleft().fds)

    def _spilled(self, waiting: _Waiting, made: tuple[bytes, int] | BridgeError) -> None:
        """Queue the notice of a long message that is now in shared memory."""
        if isinstance(made, BridgeError):
            self._on_closed()
            return
        waiting.message, fd = made
        waiting.fds.insert(0, fd)
        if not self._open:
            close_all([fd])
        elif self._waiting[0] is waiting:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        try:
            while self._waiting:
                waiting = self._waiting[0]
                if waiting.message is None:
                    # A worker still copies it.
                    break
                if not self._channel.send(waiting.message, waiting.fds):
                    return
                close_all(self._waiting.popleft().fds)
        except ChannelClosed:
            self._on_closed()
            return
        self._loop.remove_writer(self._channel.fileno())
        if not self._waiting:
            self._block(False)


class _Waiting:
    """A queued message and its descriptors; the message is None while a worker copies it."""

    __slots__ = ("fds", "message")

    def __init__(self, message: bytes | None, fds: list[int]) -> None:
        self.message = message
        self.fds = fds


def _ignore(*_: object) -> None:
    """Do nothing."""
