"""Fork servers: one for each environment of several stubs, which then start without imports of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.supervisor.orphans import Orphans
from gpubridge.engine.supervisor.stub_output import StubOutput
from gpubridge.engine.supervisor.stub_process import Child, StubProcess, execute, starting
from gpubridge.transport.fork_requests import FORKS, NOT_FORKED
from gpubridge.transport.output_pieces import LogLine

_logger = logging.getLogger(__name__)

_KNOWN_SECONDS = 30.0
_LEAST_STUBS = 3
"""Two imports of their own take as long as that of a fork server and two forks."""
_IDLE_SECONDS = 30.0
_LONGEST_SECONDS = 300.0
"""A fork server has the limits, the processors and the cgroup that the server had when it started it."""
_FAILED_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_ANSWER_BYTES = 64
_SPACE = "-" * 256
"""An argument; the command lines of stubs overwrite it."""
_PRELOADS = {"LD_PRELOAD", "LD_AUDIT"}
"""Variables of libraries that may have threads before all others."""

_BEGIN = b"\1"

_Key = tuple[str, tuple[tuple[str, str], ...]]


class ForkedStub:
    """A stub that was forked, and that this process has adopted: a `Child`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Kill it; its number is not reused until `wait`."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of a signal; 0 if unknown."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            # This process ignores SIGCHLD.
            return 0


class ForkServers:
    """Forks stubs, by a process for each environment of which several stubs start.

    The first two are not forked. With the third one within 30 s a fork server is started, which ends after
    30 s without a stub.

    - ``orphans``: adopts the stubs.
    - ``enabled``: if false, none is forked.
    """

    def __init__(self, orphans: Orphans, *, enabled: bool) -> None:
        self.orphans = orphans
        self._enabled = enabled
        self._servers: dict[_Key, _ForkServer] = {}
        # When stubs of an environment started that has no fork server; until when it gets none.
        self._starts: dict[_Key, list[float]] = {}
        self._failed: dict[_Key, float] = {}

    async def fork(
        self, environment: StubEnvironment, mark: str, words: Sequence[str], fds: Sequence[int]
    ) -> Child | None:
        """Fork a stub; the parameters and the result are those of `StubForks.fork`."""
        server = self._server(environment)
        return None if server is None else await server.fork(mark, words, fds)

    async def close(self) -> None:
        """End all fork servers, and wait until all orphans of stubs are gone or cannot be killed."""
        for server in list(self._servers.values()):
            server.close()
        await self.orphans.close()

    def _server(self, environment: StubEnvironment) -> _ForkServer | None:
        """Return an environment's fork server; None for its first stubs, and where none can be."""
        key = (environment.python, tuple(sorted(environment.variables.items())))
        server = self._servers.get(key)
        if server is None and self._is_wanted(key):
            try:
                server = _ForkServer(environment, self.orphans, partial(self._ended, key))
            except (OSError, ValueError):
                # The start of the stub itself reports what is lacking.
                return None
            self._servers[key] = server
        return server

    def _is_wanted(self, key: _Key) -> bool:
        now = time.monotonic()
        self._failed = {each: until for each, until in self._failed.items() if until > now}
        for each, times in list(self._starts.items()):
            self._starts[each] = [since for since in times if since > now - _KNOWN_SECONDS]
            if not self._starts[each]:
                del self._starts[each]
        starts = self._starts.setdefault(key, [])
        starts.append(now)
        if not self._enabled or len(starts) < _LEAST_STUBS or key in self._failed:
            return False
        return not _PRELOADS & dict(key[1]).keys()

    def _ended(self, key: _Key, failed: bool) -> None:
        del self._servers[key]
        if failed:
            self._failed[key] = time.monotonic() + _FAILED_SECONDS


class _ForkServer:
    """The fork server of an environment; owns its process and the socket to it.

    - ``on_end``: called once when it has ended, with whether it failed to fork or to start.

    Raises OSError, or ValueError, when it cannot be started.
    """

    def __init__(
        self, environment: StubEnvironment, orphans: Orphans, on_end: Callable[[bool], None]
    ) -> None:
        self._python = environment.python
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = self._execute(environment, theirs.fileno(), orphans)
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket, self._read)
        except BaseException:
            self._socket.close()
            raise
        self._process.exited.add_done_callback(lambda _: self._end())
        self._answers: deque[asyncio.Future[bytes]] = deque()
        self._ready = self._expect()
        self._idle = self._loop.call_later(_LONGEST_SECONDS, self.close)
        self._oldest = self._loop.call_later(_LONGEST_SECONDS, self.close)

    def _execute(self, environment: StubEnvironment, fd: int, orphans: Orphans) -> StubProcess:
        output = StubOutput(self._log)
        with starting(output, orphans) as mark:
            arguments = (FORKS, str(fd), str(os.getpid()), _SPACE)
            child = execute(environment, arguments, (fd,), output, mark)
            return StubProcess(child, output, orphans, mark)

    def _log(self, line: LogLine) -> None:
        _logger.info("the fork server of %s: %s", self._python, line.text)

    async def fork(self, mark: str, words: Sequence[str], fds: Sequence[int]) -> ForkedStub | None:
        """Fork a stub; the parameters and the result are those of `StubForks.fork`."""
        await asyncio.wait([self._ready], timeout=_ANSWER_SECONDS)
        if not self._ready.done():
            self.close(failed=True)
        if self._socket.fileno() < 0:
            return None
        self._idle.cancel()
        self._idle = self._loop.call_later(_IDLE_SECONDS, self.close)
        message = json.dumps({"mark": mark, "words": words}).encode()
        begin, told = os.pipe()
        try:
            try:
                socket.send_fds(self._socket, [message], [*fds, begin])
            except OSError:
                # Its queue is full, or it has ended.
                return None
            finally:
                os.close(begin)
            answer = self._expect()
            await asyncio.wait([answer], timeout=_ANSWER_SECONDS)
            if not answer.done() or answer.result() == NOT_FORKED:
                self.close(failed=True)
            if answer.result() in (b"", NOT_FORKED):
                return None
            # Its end, if it has ended by now, is reported as that of any stub.
            with suppress(BrokenPipeError):
                os.write(told, _BEGIN)
            return ForkedStub(int(answer.result()))
        finally:
            # Without the byte, a stub that was forked nevertheless ends.
            os.close(told)

    def close(self, *, failed: bool = False) -> None:
        """Kill it; its stubs stay, and those that it has not forked yet are started anew."""
        if self._socket.fileno() < 0:
            return
        self._idle.cancel()
        self._oldest.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        while self._answers:
            self._answers.popleft().set_result(b"")
        if failed:
            _logger.info("stubs of %s start without a fork server: it ended", self._python)
        self._on_end(failed)

    def _expect(self) -> asyncio.Future[bytes]:
        waiting = self._loop.create_future()
        self._answers.append(waiting)
        return waiting

    def _read(self) -> None:
        try:
            answer = self._socket.recv(_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer or not self._answers:
            self._end()
            return
        # No task waits for it where a start was given up; such a stub ends by itself.
        self._answers.popleft().set_result(answer)

    def _end(self) -> None:
        """Close it because it has ended, which it never should before it is ready."""
        self.close(failed=not self._ready.done())
