"""A stub as an operating system process: start, output, exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import gpubridge
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.supervisor.orphans import Orphans
from gpubridge.engine.supervisor.stub_output import StubOutput, log_line
from gpubridge.errors import BridgeError, unavailable
from gpubridge.transport.fork_requests import MARK

_FIRST = 0.1
_HEALTHY_AFTER = 10.0

_BOOTSTRAP = Path(gpubridge.__file__).parent / "stub" / "bootstrap.py"


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
    - ``output_token``: the token of its `StubOutput`; empty in this process.
    """

    exited: asyncio.Future[str]
    pid: int
    started: float
    output_token: str

    @property
    def last_lines(self) -> Iterable[str]:
        """The begins of the lines that it printed last."""

    def kill(self, why: str | None = None) -> None:
        """End it at once; ``why`` replaces the reported reason of its end."""


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL)
"""The signals whose stacks faulthandler writes."""

StartStub = Callable[[StubEnvironment, str, str, socket.socket, bool], Awaitable[RunningStub]]
"""Starts a stub as `start_stub` does: environment, model, instance, the stub's end of the channel, again."""


class Child(Protocol):
    """A child of this process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def kill(self) -> None:
        """Kill it, if it runs."""

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of a signal."""


class StubProcess:
    """A running stub; owns the process, its group, and its pidfd.

    Start it on the main thread: the kernel kills a stub when the *thread* that started it ends.

    - ``orphans``: terminates the stub's orphans, by its ``mark``; without it, the process group is killed.

    Its attributes are those of `RunningStub`.

    Raises OSError when no descriptor is left; the process has ended then.
    """

    def __init__(
        self, child: Child, output: StubOutput, orphans: Orphans | None, mark: str
    ) -> None:
        self._child = child
        self._output = output
        self._orphans = orphans
        self.last_lines = output.last_lines
        self.output_token = output.token
        self.pid = child.pid
        self.started = time.monotonic()
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            child.kill()
            child.wait()
            raise
        if orphans is not None:
            orphans.started(self.pid, mark)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()
        self._expected: str | None = None
        self._loop.add_reader(self._pidfd, self._reap)

    def kill(self, why: str | None = None) -> None:
        """Kill the process and its children; ``why`` is reported instead of the signal."""
        if not self.exited.done():
            self._expected = self._expected or why
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._orphans is None:
            # The zombie keeps its group id from being reused.
            os.killpg(self.pid, signal.SIGKILL)
        code = self._child.wait()
        if self._orphans is not None:
            self._orphans.ended(self.pid)
        # Its last output is logged before its end.
        self._output.close()
        if not self.exited.done():
            self.exited.set_result(self._expected or _describe(code, self._output.crash_frames))


class StubForks(Protocol):
    """Forks stubs from processes that have made their imports."""

    @property
    def orphans(self) -> Orphans:
        """The owner of the processes that dead stubs leave."""

    async def fork(
        self, environment: StubEnvironment, mark: str, words: Sequence[str], fds: Sequence[int], /
    ) -> Child | None:
        """Fork a stub; None: it is to be started anew.

        - ``words``: its command line.
        - ``fds``: its channel, standard output and standard error.
        """


async def start_stub(
    environment: StubEnvironment,
    model: str,
    instance: str,
    sock: socket.socket,
    again: bool,
    forks: StubForks | None = None,
) -> StubProcess:
    """Start a stub.

    - ``model``, ``instance``: names for the lines that the model prints; process lists show the
      instance's.
    - ``sock``: the stub's end of its channel; closed here, once the stub has it.
    - ``again``: after the death of another; it is not forked, so that no request can try addresses again.

    Raises BridgeError: UNAVAILABLE when the system lacks descriptors, memory or processes for it.
    """
    fd = sock.fileno()
    arguments = (str(fd), str(os.getpid()), instance)
    words = (environment.python, str(_BOOTSTRAP), *arguments)
    orphans = None if forks is None else forks.orphans
    with sock:
        try:
            output = StubOutput(partial(log_line, model, instance))
            with starting(output, orphans) as mark:
                child: Child | None = None
                if forks is not None and not again:
                    child = await forks.fork(environment, mark, words, (fd, *output.write_ends))
                child = child or execute(environment, arguments, (fd,), output, mark)
                return StubProcess(child, output, orphans, mark)
        except (OSError, ValueError) as error:
            # ValueError: for example, a name with a NUL.
            raise cannot_start(instance, error) from error


@contextmanager
def starting(output: StubOutput, orphans: Orphans | None) -> Iterator[str]:
    """Yield the mark of a process that the block starts; ends what belongs to it if that fails."""
    mark = "" if orphans is None else orphans.mark()
    try:
        yield mark
    except BaseException:
        output.close()
        if orphans is not None:
            orphans.failed(mark)
        raise
    finally:
        output.started()


def execute(
    environment: StubEnvironment,
    arguments: Sequence[str],
    fds: Sequence[int],
    output: StubOutput,
    mark: str,
) -> subprocess.Popen[bytes]:
    """Start the interpreter of an environment with the bootstrap; it inherits ``fds``.

    Raises OSError and ValueError as `subprocess.Popen`.
    """
    out, err = output.write_ends
    return subprocess.Popen(
        [environment.python, str(_BOOTSTRAP), *arguments],
        env={**environment.variables, MARK: mark} if mark else environment.variables,
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def cannot_start(instance: str, error: Exception) -> BridgeError:
    """Make the error for a lack of resources for a stub process."""
    return unavailable(f"cannot start the stub of '{instance}': {error}")


def _describe(code: int, frames: Sequence[str]) -> str:
    """Return how a process ended, and for a crash its Python stack: ``frames``, the innermost first."""
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
    if number in _CRASHES and frames:
        text += f", at {frames[0]}" + "".join(f"\n  called from {frame}" for frame in frames[1:])
    return text
