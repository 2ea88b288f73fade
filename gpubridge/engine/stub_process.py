"""A stub as a process of the operating system: started, watched, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import gpubridge
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.orphans import Orphans
from gpubridge.errors import BridgeError, unavailable
from gpubridge.telemetry.logs import log_from_stub

_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13
_TELLING_SECONDS = 0.002
_PAUSE_SECONDS = 0.004
_FIRST = 0.1
_HEALTHY_AFTER = 10.0

_STREAMS = {"stdout": 0, "stderr": 1}
"""Log levels (``Logger``) of a model's streams: information and warning."""

_BOOTSTRAP = Path(gpubridge.__file__).parent / "stub" / "bootstrap.py"


class PrintedLines:
    """Reads a stream that a process writes to, line by line, for as long as it likes.

    ``tell``: gets each line, without its end. Bytes that are no UTF-8 are told as escapes; where a
    line was overwritten (carriage returns), what a terminal shows in the end; longer lines than 8
    KiB in pieces. Lines that come faster than they can be told wait, and then the process does: others
    have the event loop meanwhile.

    Attribute ``write_end``: the descriptor for the process; :meth:`started` closes this one.
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
        """The process has its own end, or will never have it."""
        os.close(self.write_end)

    def close(self) -> None:
        """Tell what is left, and read no more, whoever else still has the other end; idempotent."""
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
        """Tell lines for a moment; if that is not all, go on later, and read no more before."""
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
        """Take what there is; returns how many bytes."""
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


def was_healthy(seconds: float, *, answered: bool) -> bool:
    """Return whether a stub lived long enough, or ``answered`` a request well, to reset the back-off."""
    return answered or seconds > _HEALTHY_AFTER


def next_backoff(seconds: float, limit: float) -> float:
    """Return how long to wait before the next start, after a wait of ``seconds``: it doubles."""
    return min(max(2 * seconds, _FIRST), limit)


class RunningStub(Protocol):
    """A running stub: in a process of its own, or in this one when a model is developed.

    ``exited``: resolves to how it ended ("exited with code 3", "was killed by signal 9 (SIGKILL)").
    """

    exited: asyncio.Future[str]

    def kill(self, why: str | None = None) -> None:
        """End it at once; ``why`` is told of its end."""


StartStub = Callable[[StubEnvironment, str, str, socket.socket], RunningStub]
"""Starts the stub of a model and an instance at the other end of its channel, as `StubProcess`."""


class StubProcess:
    """A running stub; owns the process, its group, and its pidfd.

    Start it on the main thread: the kernel kills a stub when the *thread* that started it ends.

    - ``model``, ``instance``: their names, for the lines that the model prints; the instance's is
      shown in process lists.
    - ``sock``: the stub's end of its channel; closed here once the stub has it.
    - ``orphans``: ends what the stub leaves behind; without, its process group is killed.

    Attribute ``exited``: resolves to how it ended ("exited with code 3", "was killed by signal 9
    (SIGKILL)").
    """

    def __init__(
        self,
        environment: StubEnvironment,
        model: str,
        instance: str,
        sock: socket.socket,
        orphans: Orphans | None = None,
    ) -> None:
        self._orphans = orphans if orphans is not None and orphans.possible else None
        variables = environment.variables
        if self._orphans is not None:
            variables = self._orphans.mark(variables)
        fd = sock.fileno()
        command = [environment.python, str(_BOOTSTRAP), str(fd), str(os.getpid()), instance]
        self._printed: list[PrintedLines] = []
        try:
            for file, level in _STREAMS.items():
                self._printed.append(PrintedLines(_into_log(model, instance, file, level)))
            out, err = self._printed
            self._process = subprocess.Popen(
                command,
                env=variables,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=out.write_end,
                stderr=err.write_end,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            # ValueError: a name with a NUL in it, for one.
            self._close_streams()
            raise cannot_start(instance, error) from error
        finally:
            for stream in self._printed:
                stream.started()
            sock.close()
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            self._close_streams()
            raise cannot_start(instance, error) from error
        if self._orphans is not None:
            self._orphans.started(self.pid, variables)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()
        self._expected: str | None = None
        self._loop.add_reader(self._pidfd, self._reap)

    def kill(self, why: str | None = None) -> None:
        """Kill the process, and so what it has started; ``why`` is told instead of the signal."""
        if not self.exited.done():
            self._expected = self._expected or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close_streams(self) -> None:
        for stream in self._printed:
            stream.close()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._orphans is None:
            # The dead process is still in its group, which is nobody else's therefore.
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._orphans is not None:
            self._orphans.ended(self.pid)
        # What it said last comes before what becomes of it.
        self._close_streams()
        if not self.exited.done():
            self.exited.set_result(self._expected or _describe(code))


def _into_log(model: str, instance: str, file: str, level: int) -> Callable[[str], None]:
    """Return what writes a line that a model has printed into the log."""
    return lambda text: log_from_stub(model, instance, {"level": level, "text": text, "file": file})


def cannot_start(instance: str, error: Exception) -> BridgeError:
    """Say that the system lacks what a stub process needs."""
    return unavailable(f"cannot start the stub of '{instance}': {error}")


def _describe(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    text = f"was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        text += ", sent from outside: by an operator or by the kernel when memory ran out"
    elif number == signal.SIGBUS:
        text += ": a client shrank its shared memory region, or a file that the model maps, or /dev/shm is full"
    return text
