"""The output of a stub: lines that it prints, and lines that its model logs, in one order."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpubridge.telemetry.logs import log_from_stub
from gpubridge.transport.output_pieces import (
    Identifier,
    LogLine,
    Piece,
    decode_line,
    new_token,
    piece_start,
    read_piece,
)

_LAST_LINES = 20
_MOST_FRAMES = 16
_FRAME_LETTERS = 200
_SHOWN_LETTERS = 500
_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13
_LONGEST_RECORD = 1 << 21
_MOST_BEGUN = 64
_MOST_TOLD = 1 << 10
_TELLING_SECONDS = 0.002
_PAUSE_SECONDS = 0.004

_LEVELS = {"stdout": 0, "stderr": 1}
"""Log levels (``Logger``) of a model's streams: information and warning."""


class StubOutput:
    """Reads the standard output and standard error of a process, with the lines of its Logger.

    - ``log``: gets each line. Those that it prints are from the file ``stdout`` or ``stderr``, line 0. Bytes that
      are not UTF-8 become escapes; of a line overwritten with carriage returns only the last version counts; lines
      longer than 8 KiB come in pieces.

    What a thread does before it logs a line, or prints before it prints to the other stream, is told before that. A
    process that prints faster than ``log`` writes is blocked by its full pipe, so that it does not occupy the event
    loop.

    Its attributes:

    - ``token``: for the process, `gpubridge.transport.output_pieces`.
    - ``last_lines``: the begins of the last lines that it printed.
    - ``crash_frames``: the frames of the last Python stack that faulthandler wrote, the innermost first.
    """

    def __init__(self, log: Callable[[LogLine], None]) -> None:
        self._log = log
        self.token = new_token()
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.crash_frames: list[str] = []
        self._told: dict[Identifier, None] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        start, reads = piece_start(self.token), itertools.count()
        self._out = _Stream("stdout", start, reads)
        try:
            self._err = _Stream("stderr", start, reads)
        except OSError:
            self._out.started()
            self._out.close()
            raise
        self._listen()

    @property
    def write_ends(self) -> list[int]:
        """Descriptors for the process, until `started`."""
        return [self._out.write_end, self._err.write_end]

    def started(self) -> None:
        """Close the write ends, once the process has them or failed to start."""
        self._out.started()
        self._err.started()

    def close(self) -> None:
        """Tell the rest and stop reading, although other processes may hold the pipes; idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        for stream in (self._out, self._err):
            left = _PIPE_BYTES
            while left > 0 and (taken := stream.read()):
                left -= taken
            stream.close()
        while self._tell_next():
            pass

    def _listen(self) -> None:
        for stream in (self._out, self._err):
            if stream.read_end >= 0:
                self._loop.add_reader(stream.read_end, self._on_readable, stream)

    def _on_readable(self, stream: _Stream) -> None:
        stream.read()
        self._tell_some()

    def _tell_some(self) -> None:
        """Tell lines for a moment; if some are left, pause reading and continue later."""
        until = time.monotonic() + _TELLING_SECONDS
        while self._tell_next():
            if time.monotonic() >= until:
                for stream in (self._out, self._err):
                    if stream.read_end >= 0:
                        self._loop.remove_reader(stream.read_end)
                self._pause = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                return

    def _resume(self) -> None:
        self._pause = None
        self._listen()
        self._tell_some()

    def _tell_next(self) -> bool:
        """Tell a line, or do a step towards one; return False if there is none.

        What lies in standard error up to the first mark whose record is to come is told before a record: the thread
        of the record has written its mark after the record. What lies behind a mark is told after the mark's record,
        which was written before the mark. So all that is waited for has come, or its process has ended before it.
        """
        out, err = self._out, self._err
        awaits = bool(err.items) and self._awaits(err.items[0])
        if out.items and isinstance(out.items[0], bytes):
            self._tell(out)
        elif out.items:
            if err.items:
                self._tell(out if awaits else err)
            elif not (err.read_after(out) or err.cut()):
                self._tell(out)
        elif awaits:
            if not out.read_after(err):
                err.items.popleft()
        elif err.items:
            self._tell(err)
        else:
            return False
        return True

    def _awaits(self, item: bytes | _Record) -> bool:
        return isinstance(item, _Record) and item.identifier not in self._told

    def _tell(self, stream: _Stream) -> None:
        item = stream.items.popleft()
        if isinstance(item, bytes):
            text = item.decode(errors="backslashreplace")
            self.last_lines.append(text[:_SHOWN_LETTERS])
            self._note_crash(text)
            self._log(LogLine(_LEVELS[stream.name], text, stream.name, 0))
        elif stream is self._err:
            self._told.pop(item.identifier, None)
        else:
            self._told[item.identifier] = None
            if len(self._told) > _MOST_TOLD:
                # Its process ended before it wrote the mark.
                del self._told[next(iter(self._told))]
            line = decode_line(item.line)
            if line is not None:
                self._log(line)

    def _note_crash(self, text: str) -> None:
        """Keep the frames of what faulthandler writes; it writes what the process does last."""
        if text.startswith("Fatal Python error: "):
            self.crash_frames.clear()
        elif text.startswith('  File "') and len(self.crash_frames) < _MOST_FRAMES:
            self.crash_frames.append(text.strip()[:_FRAME_LETTERS])


def log_line(model: str, instance: str, line: LogLine) -> None:
    """Write a line of a model's instance into the server's log."""
    log_from_stub(model, instance, line._asdict())


@dataclass(frozen=True, slots=True)
class _Record:
    """A record, or its mark, whose ``line`` is empty."""

    identifier: Identifier
    line: bytes | bytearray


class _Stream:
    """One pipe: splits what is read into lines and records; owns the descriptors.

    - ``start``: begins pieces.
    - ``reads``: numbers the reads of both pipes.

    Its attributes:

    - ``read_end``: -1 once it is closed.
    - ``write_end``: for the process, until `started`.
    """

    def __init__(self, name: str, start: bytes, reads: Iterator[int]) -> None:
        self.name = name
        self.items: deque[bytes | _Record] = deque()
        self._start = start
        self._reads = reads
        self._last_read = -1
        self._rest = b""
        self._line = b""
        # Whether the unfinished line has begun with one that is in `items`.
        self._continues = False
        self._begun: dict[Identifier, bytearray] = {}
        self._loop = asyncio.get_running_loop()
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)

    def started(self) -> None:
        """Close the write end."""
        os.close(self.write_end)

    def read(self) -> int:
        """Read available bytes, all that are in the pipe now; return their number."""
        self._last_read = next(self._reads)
        if self.read_end < 0:
            return 0
        try:
            data = os.read(self.read_end, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._split(data)
        else:
            self.close()
        return len(data)

    def read_after(self, other: _Stream) -> bool:
        """Read, unless that was done after the last read of the other stream; return whether it was to be."""
        behind = self._last_read < other._last_read
        if behind:
            self.read()
        return behind

    def cut(self) -> bool:
        """End the unfinished line here; return False if there is none."""
        line, self._line = self._line, b""
        if line:
            self._add_line(line)
            self._continues = True
        return bool(line)

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self.read_end < 0:
            return
        self._loop.remove_reader(self.read_end)
        os.close(self.read_end)
        self.read_end = -1
        if not self._rest.startswith(self._start):
            self._add_text(self._rest)
        self.cut()
        # Of a process that was killed while it wrote them.
        self.items.extend(_Record(*begun) for begun in self._begun.items())

    def _split(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while (found := data.find(self._start, at)) >= 0:
            self._add_text(data[at:found])
            piece = read_piece(data, found + len(self._start))
            if piece is None:
                self._rest = data[found:]
                return
            self._add_piece(piece)
            at = piece.end
        # The last bytes may begin a piece, whose begin has one NUL.
        end = data.rfind(b"\0", max(at, len(data) - len(self._start)))
        if end < 0 or not self._start.startswith(data[end:]):
            end = len(data)
        self._add_text(data[at:end])
        self._rest = data[end:]

    def _add_piece(self, piece: Piece) -> None:
        whole = self._begun.pop(piece.record, bytearray())
        whole += piece.data
        if piece.more and len(whole) < _LONGEST_RECORD:
            self._begun[piece.record] = whole
            if len(self._begun) <= _MOST_BEGUN:
                return
            # Its process ended before it wrote the rest.
            oldest = next(iter(self._begun))
            piece = piece._replace(record=oldest)
            whole = self._begun.pop(oldest)
        self.cut()
        self.items.append(_Record(piece.record, whole))

    def _add_text(self, text: bytes) -> None:
        *lines, rest = (self._line + text).split(b"\n")
        if lines and self._continues:
            self._continues = False
            if not lines[0].strip(b"\r"):
                del lines[0]
        for line in lines:
            self._add_line(line)
        whole = len(rest) - len(rest) % _LONGEST_LINE
        if whole:
            self._add_line(rest[:whole])
            self._continues = True
        self._line = rest[whole:]

    def _add_line(self, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        for start in range(0, len(shown) or 1, _LONGEST_LINE):
            self.items.append(shown[start : start + _LONGEST_LINE])
