"""A stub as an operating system process: start, output, exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import gpubridge
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.supervisor.orphans import Orphans
from gpubridge.errors import BridgeError, unavailable
from gpubridge.telemetry.logs import log_from_stub

_PIPE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 13
_LAST_LINES = 20
_SHOWN_LETTERS = 500
_TELLING_SECONDS = 0.002
_PAUSE_SECONDS = 0.004
_FIRST = 0.1
_HEALTHY_AFTER = 10.0

_STREAMS = {"stdout": 0, "stderr": 1}
"""Log levels (``Logger``) of a model's streams: information and warning."""

_BOOTSTRAP = Path(gpubridge.__file__).parent / "stub" / "bootstrap.py"


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


def was_healthy(seconds: float, *, answered: bool) -> bool:
    """Return whether a stub ran long enough, or ``answered`` a request, to reset the back-off."""
    return answered or seconds > _HEALTHY_AFTER


def next_backoff(seconds: float, limit: float) -> float:
    """Return the delay of the next start after one of ``seconds``: twice that, within limits."""
    return min(max(2 * seconds, _FIRST), limit)


class RunningStub(Protocol):
    """A running stub: a process, or a thread of this process during development.

    - ``exited``: resolves to how it ended ("exited with code 3", "was killed by signal 9 (SIGKILL)").
    - ``pid``: its process.
    - ``started``: when it was started, in seconds of CLOCK_MONOTONIC.
    """

    exited: asyncio.Future[str]
    pid: int
    started: float

    @property
    def last_lines(self) -> Iterable[str]:
        """The begins of the lines that it printed last."""

    def kill(self, why: str | None = None) -> None:
        """End it at once; ``why`` replaces the reported reason of its end."""


StartStub = Callable[[StubEnvironment, str, str, socket.socket], RunningStub]
"""Starts a stub as `StubProcess` does: environment, model, instance, the stub's end of the channel."""


class StubProcess:
    """A running stub; owns the process, its group, and its pidfd.

    Start it on the main thread: the kernel kills a stub when the *thread* that started it ends.

    - ``model``, ``instance``: names for the lines that the model prints; process lists show the
      instance's.
    - ``sock``: the stub's end of its channel; closed here once the stub has inherited it.
    - ``orphans``: terminates the stub's orphans; without it, the process group is killed.

    Its attributes are those of `RunningStub`.
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
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            for file, level in _STREAMS.items():
                tell = self._into_log(model, instance, file, level)
                self._printed.append(PrintedLines(tell))
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
            # ValueError: for example, a name with a NUL.
            self._close_streams()
            raise cannot_start(instance, error) from error
        finally:
            for stream in self._printed:
                stream.started()
            sock.close()
        self.pid = self._process.pid
        self.started = time.monotonic()
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
        """Kill the process and its children; ``why`` is reported instead of the signal."""
        if not self.exited.done():
            self._expected = self._expected or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _into_log(self, model: str, instance: str, file: str, level: int) -> Callable[[str], None]:
        """Return a function that logs a line that the model printed."""

        def tell(text: str) -> None:
            self.last_lines.append(text[:_SHOWN_LETTERS])
            log_from_stub(model, instance, {"level": level, "text": text, "file": file})

        return tell

    def _close_streams(self) -> None:
        for stream in self._printed:
            stream.close()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._orphans is None:
            # The zombie keeps its group id from being reused.
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._orphans is not None:
            self._orphans.ended(self.pid)
        # Its last output is logged before its end.
        self._close_streams()
        if not self.exited.done():
            self.exited.set_result(self._expected or _describe(code))


def cannot_start(instance: str, error: Exception) -> BridgeError:
    """Make the error for a lack of resources for a stub process."""
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
