"""Lines that a process prints."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13
_TELLING_SECONDS = 0.002
_PAUSE_SECONDS = 0.004


class PrintedLines:
    """Reads a stream of a process line by line.

    ``tell``: gets each line, without its end. Bytes that are not UTF-8 become escapes; of a line
    overwritten with carriage returns only the last version counts; lines longer than 8 KiB come in
    pieces. A process that prints faster than ``tell`` logs is blocked by its full pipe, so that it
    does not occupy the event loop.

    Attribute ``write_end``: the descriptor for the process; :meth:`started` closes it here.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._rest = b""
        self._lines: deque[bytes] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._on_readable)

    def started(self) -> None:
        """Close the write end, once the process has inherited it or failed to start."""
        os.close(self.write_end)

    def close(self) -> None:
        """Report the rest and stop reading, although other processes may hold the pipe; idempotent."""
        if self._read_end < 0:
            return
        left = _PIPE_BYTES
        while self._read_end >= 0 and (taken := self._read()):
            left -= taken
            if left <= 0:
                break
        self._end()

    def _on_readable(self) -> None:
        self._read()
        self._tell_some()

    def _tell_some(self) -> None:
        """Report lines for a moment; if some are left, pause reading and continue later."""
        self._pause = None
        until = time.monotonic() + _TELLING_SECONDS
        while self._lines and time.monotonic() < until:
            self._say(self._lines.popleft())
        if self._read_end < 0:
            return
        if self._lines:
            self._loop.remove_reader(self._read_end)
            self._pause = self._loop.call_later(_PAUSE_SECONDS, self._tell_some)
        else:
            self._loop.add_reader(self._read_end, self._on_readable)

    def _read(self) -> int:
        """Read available bytes; return their number."""
        try:
            data = os.read(self._read_end, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)
        whole = len(rest) - len(rest) % _LONGEST_LINE
        if whole:
            self._lines.append(rest[:whole])
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
        if self._pause is not None:
            self._pause.cancel()
        if self._rest:
            self._lines.append(self._rest)
            self._rest = b""
        while self._lines:
            self._say(self._lines.popleft())
