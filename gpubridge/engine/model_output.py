"""What models print: a pipe for each stream of each stub, its lines into the log with the model's name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

__all__ = ["PrintedLines"]

_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13


class PrintedLines:
    """Reads a stream that a process writes to, line by line, for as long as it likes.

    Parameters
    ----------
    tell : callable
        Gets each line, without its end. Bytes that are no UTF-8 are told as escapes; where a line
        was overwritten (carriage returns), what a terminal shows in the end; longer lines than 8 KiB
        in pieces.

    Attributes
    ----------
    write_end : int
        The descriptor for the process; :meth:`started` closes this one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._on_readable)

    def started(self) -> None:
        """The process has its own end, or will never have it."""
        os.close(self.write_end)

    def close(self) -> None:
        """Tell what is left, and read no more, whoever else still has the other end; idempotent."""
        if self._read_end < 0:
            return
        left = _PIPE_BYTES
        while self._read_end >= 0 and (taken := self._on_readable()):
            left -= taken
            if left <= 0:
                break
        self._end()

    def _on_readable(self) -> int:
        """Take what there is; returns how many bytes."""
        try:
            data = os.read(self._read_end, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line)
        whole = len(rest) - len(rest) % _LONGEST_LINE
        if whole:
            self._say(rest[:whole])
        self._rest = rest[whole:]
        return len(data)

    def _say(self, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        for start in range(0, len(shown) or 1, _LONGEST_LINE):
            piece = shown[start : start + _LONGEST_LINE]
            self._tell(piece.decode(errors="backslashreplace"))

    def _end(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        if self._rest:
            self._say(self._rest)
            self._rest = b""
