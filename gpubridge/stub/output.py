"""Standard output, standard error and `Logger` of a stub, whose texts keep their order."""

from __future__ import annotations

import errno
import io
import itertools
import os
import select
import sys
import threading
from contextlib import suppress
from typing import Any

from gpubridge.transport.output_pieces import LogLine, encode_line, encode_pieces, piece_start

_LAST_SECONDS = 1.0
_LONGEST_LINE = 1 << 18


class Output:
    """Owns the streams that Python prints to, and writes the lines of Logger between what they write.

    It lives as long as the process. Any thread may print and log, and processes that the model forks. One thread at a
    time writes, so that no line of Logger comes in the midst of a long line that another one prints. Text that Python
    still buffers is written before a line of Logger. A stream that the model sends elsewhere (``os.dup2``) goes there.

    - ``token``: begins the pieces in the pipes, `gpubridge.transport.output_pieces`.
    """

    def __init__(self, token: str) -> None:
        self._start = piece_start(token)
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._out, self._err = _Pipe(1), _Pipe(2)
        # Into which anything was printed since the last record, by this process.
        self._printed: _Pipe | None = None
        out, err = self._stream(self._out, sys.stdout), self._stream(self._err, sys.stderr)
        sys.stdout = sys.__stdout__ = out  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = err  # type: ignore[misc]
        self._streams = (out, err)
        # What is buffered is written once.
        os.register_at_fork(before=self._flush, after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Replace the lock in a forked child, where no other thread gives it back."""
        self._lock = threading.RLock()

    def log(self, line: LogLine) -> None:
        """Write a line of Logger; where the model has closed the pipes, to its standard error."""
        self._flush()
        held = self._take_turn()
        try:
            self._write_record(encode_line(line))
        except OSError:
            # Also where the server is gone, and nobody reads either.
            with suppress(Exception):
                sys.stderr.write(f"{line.text}\n")
        finally:
            if held:
                self._lock.release()

    def print(self, pipe: _Pipe, data: memoryview) -> None:
        """Write what is printed to a stream, behind all that was printed to the other one."""
        held = self._take_turn()
        try:
            if self._printed is not None and self._printed is not pipe:
                with suppress(OSError):
                    self._write_record(b"")
            self._printed = pipe
            _write(pipe.number, data)
        finally:
            if held:
                self._lock.release()

    def _write_record(self, line: bytes) -> None:
        self._printed = None
        record = (os.getpid(), next(self._numbers) & 0xFFFF_FFFF)
        for piece in encode_pieces(self._start, record, line):
            self._out.write(piece)
        with suppress(OSError):
            for mark in encode_pieces(self._start, record):
                self._err.write(mark)

    def _take_turn(self) -> bool:
        """Wait until no other thread writes; return whether this one is to release the lock."""
        # A daemon thread that has it when the interpreter ends keeps it.
        return self._lock.acquire(timeout=_LAST_SECONDS if sys.is_finalizing() else -1)

    def _flush(self) -> None:
        """Write what Python buffers of what is printed into the pipes.

        Not of other streams: whoever reads one may wait for this thread.
        """
        streams = (*self._streams, sys.stdout, sys.stderr)
        for stream in {id(each): each for each in streams}.values():
            # Anything may be raised: the stream may be closed, or of a class of the model's.
            with suppress(Exception):
                if isinstance(stream, io.TextIOBase):
                    number = stream.fileno()
                    if self._out.is_at(number) or self._err.is_at(number):
                        stream.flush()

    def _stream(self, pipe: _Pipe, before: Any) -> io.TextIOWrapper:
        # Line-buffered despite PYTHONUNBUFFERED: other processes write to the same log.
        stream = io.TextIOWrapper(
            _Raw(self, pipe), before.encoding, before.errors, "\n", line_buffering=True
        )
        stream.mode = "w"  # type: ignore[misc]
        # A line is one write, though `print` adds its end in a second step: none of another thread comes between.
        stream._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
        return stream


class _Raw(io.FileIO):
    """Descriptor 1 or 2, as a stream of bytes."""

    def __init__(self, output: Output, pipe: _Pipe) -> None:
        super().__init__(pipe.number, "w", closefd=False)
        self.name = f"<{pipe.name}>"
        self._output = output
        self._pipe = pipe

    def write(self, data: Any) -> int:
        """Write all of some bytes, to the pipe or where the model has put its place."""
        if not self._pipe.is_at(self._pipe.number):
            return super().write(data)
        view = memoryview(data).cast("B")
        self._output.print(self._pipe, view)
        return len(view)


class _Pipe:
    """A pipe to the server, which is at a standard descriptor of this process; owns a duplicate.

    - ``number``: the standard descriptor.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = "stdout" if number == 1 else "stderr"
        self._own = os.dup(number)
        self._file = _file(number)

    def is_at(self, number: int) -> bool:
        """Return whether a descriptor is the pipe's: the model may have closed or replaced it."""
        try:
            return _file(number) == self._file
        except OSError:
            return False

    def write(self, data: bytes) -> None:
        """Write all of some bytes; raises OSError if no descriptor is the pipe's, or the server is gone."""
        number = next(filter(self.is_at, (self._own, self.number)), None)
        if number is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        _write(number, data)


def _write(number: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(number, rest) :]
        except BlockingIOError:
            # A program that shares the pipe has made it non-blocking.
            looked = select.poll()
            looked.register(number, select.POLLOUT)
            looked.poll()


def _file(number: int) -> tuple[int, int]:
    state = os.fstat(number)
    return state.st_dev, state.st_ino
