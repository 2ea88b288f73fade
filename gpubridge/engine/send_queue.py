"""Messages on their way to a stub: sent at once, or kept in order until the channel has room."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from gpubridge.transport.channel import Channel, ChannelClosed


class SendQueue:
    """Sends on a channel that does not block; owns the messages that wait.

    - ``on_closed``: told when the other side is gone.
    - ``block``: told whether others that send on the channel must not, since messages wait or this
      is closed.
    """

    def __init__(
        self,
        channel: Channel,
        on_closed: Callable[[], None],
        block: Callable[[bool], None] | None = None,
    ) -> None:
        self._channel = channel
        self._on_closed = on_closed
        self._block = block or _ignore
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._open = True

    def send(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a message and the descriptors in ``fds``, which stay the caller's."""
        if not self._open:
            return
        try:
            if not self._waiting and self._channel.send(message, fds):
                return
        except ChannelClosed:
            self._on_closed()
            return
        if not self._waiting:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)
            self._block(True)
        # Duplicated, since their owner may close them before their turn comes.
        self._waiting.append((message, tuple(os.dup(fd) for fd in fds)))

    def close(self) -> None:
        """Send nothing any more; idempotent."""
        if not self._open:
            return
        self._open = False
        # Its owner and this refer to each other: memory must not wait for the garbage collector.
        self._on_closed = _ignore
        self._block(True)
        self._loop.remove_writer(self._channel.fileno())
        while self._waiting:
            self._forget()

    def _on_writable(self) -> None:
        try:
            while self._waiting:
                message, fds = self._waiting[0]
                if not self._channel.send(message, fds):
                    return
                self._forget()
        except ChannelClosed:
            self._on_closed()
            return
        self._loop.remove_writer(self._channel.fileno())
        self._block(False)

    def _forget(self) -> None:
        for fd in self._waiting.popleft()[1]:
            os.close(fd)


def _ignore(*_: object) -> None:
    """Nobody is to be told."""
