"""What the server sends, with a look at the batch that comes next before its turn."""

from __future__ import annotations

from collections import deque
from typing import Callable

from gpubridge.tensor.native import NativeRecordReader
from gpubridge.transport.channel import Channel
from gpubridge.transport.messages import Batch, Kind, decode_execute
from gpubridge.transport.short_waits import ShortWaits

__all__ = ["BatchesAhead"]


class BatchesAhead:
    """Reads a channel like `Channel`; of what follows a batch, only new regions come before its end.

    Parameters
    ----------
    channel : Channel
        Stays the caller's, who reads from it only through this.
    reader : NativeRecordReader
        Of the channel's records.
    take_region : callable
        Takes a REGION message and its descriptors: those come before the first batch that needs them.
    """

    def __init__(
        self,
        channel: Channel,
        reader: NativeRecordReader,
        take_region: Callable[[bytes, list[int]], None],
    ) -> None:
        self._channel = channel
        self._reader = reader
        self._take_region = take_region
        # The batches of the message at hand that have not begun.
        self._coming: deque[Batch] = deque()
        # The message after it, if it was looked at, and its batches, if it has some.
        self._kept: tuple[bytes, list[int]] | None = None
        self._kept_batches: list[Batch] | None = None

    def receive(self) -> tuple[bytes, list[int]]:
        """Receive one message, as `Channel.receive`."""
        if self._kept is None:
            return self._channel.receive()
        kept, self._kept = self._kept, None
        return kept

    def poll(self, nanoseconds: int, waits: ShortWaits) -> None:
        """Stay awake until `receive` would not wait, as `Channel.poll`."""
        if self._kept is None:
            self._channel.poll(nanoseconds, waits)

    def wait(self, seconds: float) -> bool:
        """Wait until `receive` would not wait, as `Channel.wait`."""
        return self._kept is not None or self._channel.wait(seconds)

    def batches(self, message: bytes, reader: NativeRecordReader) -> list[Batch]:
        """Take the EXECUTE message that was received last apart, as `decode_execute`."""
        batches, self._kept_batches = self._kept_batches, None
        if batches is None:
            batches = decode_execute(message, reader)
        self._coming = deque(batches)
        return batches

    def begin(self) -> Batch | None:
        """Note that the first of the coming batches begins.

        Returns
        -------
        Batch or None
            The one after it, if it is here.

        Raises
        ------
        ChannelClosed, MalformedMessage
            As `receive`.
        """
        self._coming.popleft()
        if self._coming:
            return self._coming[0]
        while self._kept is None and self._channel.wait(0):
            message, fds = self._channel.receive()
            if message[0] in (Kind.REGION, Kind.PIN):
                self._take_region(message, fds)
                continue
            self._kept = message, fds
            if message[0] == Kind.EXECUTE:
                self._kept_batches = decode_execute(message, self._reader)
        return self._kept_batches[0] if self._kept_batches else None
