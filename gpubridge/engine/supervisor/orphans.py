"""Orphaned processes: terminates those of dead stubs, and reaps all."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from gpubridge.telemetry.logs import request_error
from gpubridge.transport.fork_requests import MARK

_PR_SET_CHILD_SUBREAPER = 36
_SELDOM_SECONDS = 5.0
_SOON_SECONDS = 0.05
_LAST_SECONDS = 5.0
_GRACE_SECONDS = 1.0
"""Between SIGTERM and SIGKILL: time for the resource tracker of ``multiprocessing`` to remove shared
memory whose users are gone."""

_MARK = re.compile(rb"(?:^|\0)%s=([^\0]*)" % MARK.encode())

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Child:
    """A child of this process, by /proc."""

    pid: int
    state: str
    group: int
    session: int


class Orphans:
    """Terminates the orphans of dead stubs, and reaps children that no other code waits for.

    An orphan becomes a child of this process, which is process 1 or a subreaper. It belongs to a dead
    stub by its process group, its session, or a variable of its environment, which survives a new
    session. A process with none of these was detached deliberately, or is not a model's.

    Attribute ``possible``: whether the system reports orphans; otherwise this class does nothing.
    """

    def __init__(self) -> None:
        adopts = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self.possible = adopts and Path("/proc/thread-self/children").exists()
        self._server = secrets.token_hex(4)
        self._numbers = count()
        # Marks of stubs that run or start; by process id: those that run; when an orphan of a dead stub
        # was last seen.
        self._marks: set[str] = set()
        self._stubs: dict[int, str] = {}
        self._dead: dict[int, float] = {}
        # By process id: when to kill a terminated orphan; since when another child is a zombie.
        self._ending: dict[int, float] = {}
        self._zombies: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def mark(self) -> str:
        """Return the value of `MARK` for a stub that is to be started, and its children."""
        mark = f"{self._server}.{next(self._numbers):08}"
        self._marks.add(mark)
        return mark

    def started(self, pid: int, mark: str) -> None:
        """Record a started stub and its mark."""
        self._stubs[pid] = mark
        self._dead.pop(pid, None)

    def failed(self, mark: str) -> None:
        """Record that the stub for a mark was not started."""
        self._marks.discard(mark)

    def ended(self, pid: int) -> None:
        """Record a reaped stub, and terminate its orphans."""
        self._marks.discard(self._stubs.pop(pid))
        self._dead[pid] = self._loop.time()
        self._check()

    async def close(self) -> None:
        """Stop once all orphans of dead stubs are gone, or cannot be killed."""
        for _ in range(round(_LAST_SECONDS / _SOON_SECONDS)):
            if not self._check():
                break
            await asyncio.sleep(_SOON_SECONDS)
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> bool:
        """Process all children and schedule the next check; return whether orphans remain."""
        if not self.possible:
            return False
        if self._timer is not None:
            self._timer.cancel()
        try:
            busy = self._process_children(list(_children(self._stubs)), self._loop.time())
        except Exception as error:  # noqa: BLE001  (a bug of ours does not end the checks)
            # An OSError is, for example, that no descriptor is left.
            busy = False
            if not isinstance(error, OSError):
                request_error(error, "look for orphans")
        delay = _SOON_SECONDS if busy else _SELDOM_SECONDS
        self._timer = self._loop.call_later(delay, self._check)
        return busy

    def _process_children(self, children: list[_Child], now: float) -> bool:
        ending, known = self._ending, self._zombies
        self._ending, self._zombies = {}, {}
        busy = False
        for child in children:
            if child.state == "Z":
                since = known.get(child.pid, now)
                # Other code that starts processes gets time to wait for them.
                if child.pid in ending or now >= since + _SELDOM_SECONDS / 2:
                    busy = _reap(child.pid) or busy
                else:
                    self._zombies[child.pid] = since
            elif self._is_left(child):
                busy = True
                self._dead.update(
                    dict.fromkeys({child.group, child.session} & self._dead.keys(), now)
                )
                self._ending[child.pid] = self._end(child, ending.get(child.pid), now)
        forget = now - 2 * _SELDOM_SECONDS
        self._dead = {pid: seen for pid, seen in self._dead.items() if seen > forget}
        return busy

    def _is_left(self, child: _Child) -> bool:
        """Return whether a process is an orphan of a dead stub."""
        try:
            environment = Path(f"/proc/{child.pid}/environ").read_bytes()
        except OSError:
            environment = b""
        found = _MARK.search(environment)
        mark = found[1].decode(errors="replace") if found else ""
        # First, since a stub that starts may have the number of a dead one.
        if mark.startswith(f"{self._server}."):
            return mark not in self._marks
        return child.group in self._dead or child.session in self._dead

    def _end(self, child: _Child, deadline: float | None, now: float) -> float:
        """Terminate a process, then kill it at the deadline; return the deadline."""
        if deadline is None:
            _logger.info(
                "sending SIGTERM to process %d: its model has ended",
                child.pid,
            )
            _send(child.pid, signal.SIGTERM)
            return now + _GRACE_SECONDS
        if now >= deadline:
            _send(child.pid, signal.SIGKILL)
        return deadline


def _children(others: dict[int, str]) -> Iterator[_Child]:
    """Yield the children of this process except ``others``."""
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = [int(word) for word in (task / "children").read_bytes().split()]
        except OSError:
            # A thread that has ended.
            continue
        for pid in pids:
            if pid not in others and (child := _child(pid)) is not None:
                yield child


def _child(pid: int) -> _Child | None:
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Child(pid, words[0].decode(), int(words[2]), int(words[3]))


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a child, which keeps its number until it is reaped."""
    # A process that changed its user cannot be signalled.
    with suppress(PermissionError):
        os.kill(pid, number)


def _reap(pid: int) -> bool:
    """Reap a zombie; return whether there was one."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False
