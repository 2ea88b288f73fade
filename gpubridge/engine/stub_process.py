"""A stub as a process of the operating system: started, watched, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import gpubridge
from gpubridge.engine.environment import StubEnvironment
from gpubridge.engine.model_output import PrintedLines
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.logs import log_from_stub

__all__ = ["RunningStub", "StartStub", "StubProcess", "cannot_start"]

_STREAMS = {"stdout": 0, "stderr": 1}
"""What models print is information, and what they complain of a warning: levels of ``Logger``."""

_BOOTSTRAP = Path(gpubridge.__file__).parent / "stub" / "bootstrap.py"


class RunningStub(Protocol):
    """Where a stub runs: in a process of its own, unless somebody develops the model.

    Attributes
    ----------
    exited : asyncio.Future of str
        Resolves to how it ended ("exited with code 3", "was killed by signal 9 (SIGKILL)").
    """

    exited: asyncio.Future[str]

    def kill(self, why: str | None = None) -> None:
        """End it at once; ``why`` is told of its end."""


class StartStub(Protocol):
    """Starts the stub of an instance at the other end of its channel."""

    def __call__(
        self, environment: StubEnvironment, model: str, instance: str, sock: socket.socket, /
    ) -> RunningStub:
        """Start it; ``sock`` is owned from now on. Raises BridgeError when that cannot be."""


class StubProcess:
    """A running stub; owns the process, its group, and its pidfd.

    Start it on the main thread: the kernel kills a stub when the *thread* that started it ends.

    Parameters
    ----------
    model, instance : str
        Their names, for the lines that the model prints; the instance's is shown in process lists.
    sock : socket.socket
        The stub's end of its channel; closed here once the stub has it.

    Attributes
    ----------
    exited : asyncio.Future of str
        Resolves to how it ended ("exited with code 3", "was killed by signal 9 (SIGKILL)").
    """

    def __init__(
        self, environment: StubEnvironment, model: str, instance: str, sock: socket.socket
    ) -> None:
        fd = sock.fileno()
        command = [environment.python, str(_BOOTSTRAP), str(fd), str(os.getpid()), instance]
        self._printed: list[PrintedLines] = []
        try:
            for file, level in _STREAMS.items():
                self._printed.append(PrintedLines(_into_log(model, instance, file, level)))
            out, err = self._printed
            self._process = subprocess.Popen(
                command,
                env=environment.variables,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=out.write_end,
                stderr=err.write_end,
                start_new_session=True,
            )
        except OSError as error:
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
            self._kill_group()
            self._process.wait()
            self._close_streams()
            raise cannot_start(instance, error) from error
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()
        self._expected: str | None = None
        self._loop.add_reader(self._pidfd, self._reap)

    def kill(self, why: str | None = None) -> None:
        """Kill the whole process group; ``why`` is told instead of the signal."""
        if not self.exited.done():
            self._expected = self._expected or why
            self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _close_streams(self) -> None:
        for stream in self._printed:
            stream.close()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Children that the model left behind go with it; the group lives on while one of them does.
        self._kill_group()
        code = self._process.wait()
        # What it said last comes before what becomes of it.
        self._close_streams()
        if not self.exited.done():
            self.exited.set_result(self._expected or _describe(code))


def _into_log(model: str, instance: str, file: str, level: int) -> Callable[[str], None]:
    """Return what writes a line that a model has printed into the log."""
    return lambda text: log_from_stub(model, instance, {"level": level, "text": text, "file": file})


def cannot_start(instance: str, error: OSError) -> BridgeError:
    """Say that the system lacks what a stub process needs."""
    return BridgeError(f"cannot start the stub of '{instance}': {error}", ErrorCode.UNAVAILABLE)


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
        text += ": a client shrank its shared memory region, or a file that the model maps"
    return text
