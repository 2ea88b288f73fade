"""Processes that begin as copies of one that has imported what they need: each costs a fork, no imports."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Fork", "fork"]

# What a process, or a library while it is loaded, reads once.
_AT_ITS_START = (
    *("LD_", "PYTHON", "OPENBLAS_", "OMP_", "LC_", "LANG", "TZ", "GLIBC_", "MALLOC_"),
    "GPUBRIDGE_NO_NATIVE",
)

# A process that takes longer to fork, or to be gone once it is killed, never will.
_SECONDS = 60

_PROGRAM = """
import atexit, contextlib, gc, json, os, select, signal, socket, sys, threading

read = {}

class Noted(os._Environ):
    # Notes what imports read, and a fork does not read again.
    def __getitem__(self, name):
        read[name] = None
        read[name] = super().__getitem__(name)
        return read[name]

def become_one_of_many():
    # Forks for each request, and returns in the forks.
    control = socket.socket(fileno=int(sys.argv.pop()))
    control.send(json.dumps(read).encode())
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ends = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while ends:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                end = ends.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(end)
        if control not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            # Whoever started them is gone, or has waited for them.
            for pid in ends:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        message = json.loads(message)
        if isinstance(message, list):
            pid, number = message
            if pid in ends:
                os.kill(pid, number)
            continue
        *streams, end = fds
        pid = os.fork()
        if pid:
            ends[pid] = end
            for fd in streams:
                os.close(fd)
            control.send(b"%d" % pid)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for fd in (woken, wake, end, *ends.values()):
            os.close(fd)
        # The interpreter's objects for the standard streams, which are unused so far, stay.
        for standard, fd in enumerate(streams):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.clear()
        os.environ.update(message["environment"])
        os.chdir(message["folder"])
        if message["session"]:
            os.setsid()
        sys.argv = message["arguments"]
        return

os.environ.__class__ = Noted
{imports}
os.environ.__class__ = os._Environ
gc.freeze()
become_one_of_many()
code = 0
try:
    {program}
except SystemExit as ended:
    code = ended.code
if code is not None and not isinstance(code, int):
    sys.exit(code)
# All that a program sees of an interpreter's end. The rest would free, and so copy, each page of the imports.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code or 0)
"""

_parents: dict[tuple[str, ...], list[_Parent]] = {}
_lock = threading.Lock()


class Fork:
    """A forked process; attributes and methods are as those of `subprocess.Popen`."""

    def __init__(self, parent: _Parent, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._end = end

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is gone; return its exit code."""
        code = self._ended(None if timeout is None else timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it is still there."""
        if self.poll() is None:
            self._parent.signal(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, if it is still there."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and wait until it is gone; `subprocess.TimeoutExpired` if it does not go.

        Closing it again has no effect.
        """
        if self._end < 0:
            return
        try:
            self.kill()
            self.wait(_SECONDS)
        finally:
            os.close(self._end)
            self._end = -1

    def _ended(self, milliseconds: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._end, select.POLLIN)
            if waiting.poll(milliseconds):
                told = os.read(self._end, 16)
                assert told, "the process that forks has ended"
                self.returncode = int(told)
        return self.returncode


class _Parent:
    """A process that forks; it ends with this one."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        atexit.register(self._close)
        told = self._control.recv(1 << 16)
        assert told, "the process that forks ended before its first fork"
        self._read: dict[str, str | None] = json.loads(told)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether its imports would have read the same in an environment."""
        return all(environment.get(name) == value for name, value in self._read.items())

    def fork(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        streams: Sequence[int],
        folder: Path,
        session: bool,
    ) -> Fork:
        end, told = os.pipe()
        message = {
            "environment": dict(environment),
            "folder": str(folder),
            "arguments": ["", *arguments],
            "session": session,
        }
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], [*streams, told])
            answer = self._control.recv(16)
        finally:
            os.close(told)
        assert answer, "the process that forks has ended"
        return Fork(self, int(answer), end)

    def signal(self, pid: int, number: int) -> None:
        # Only it knows whether the number is still that of a fork.
        self._control.send(json.dumps([pid, number]).encode())

    def _close(self) -> None:
        self._control.close()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


def fork(
    imports: str,
    program: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    *,
    session: bool = False,
) -> Fork:
    """Run a program in a fork of a process that has made its imports, and stays for the next one.

    Parameters
    ----------
    imports : str
        Runs once, before the first fork: no driver, no thread, nothing that copies would share.
    program : str
        Runs in each fork.
    environment : mapping
        All of its environment.
    streams : sequence of int
        Descriptors of its standard input, output and errors; they stay the caller's.
    arguments : sequence of str
        What follows the first item of `sys.argv`.
    folder : Path, optional
        Its working directory; this process's without it.
    session : bool
        Whether it leads a session of its own.
    """
    read = sorted(name for name in environment if name.startswith(_AT_ITS_START))
    inner = textwrap.indent(program, "    ").lstrip()
    source = _PROGRAM.replace("{imports}", imports).replace("{program}", inner)
    key = (source, *(f"{name}={environment[name]}" for name in read))
    with _lock:
        parents = _parents.setdefault(key, [])
        parent = next((each for each in parents if each.fits(environment)), None)
        if parent is None:
            parent = _Parent(source, environment)
            parents.append(parent)
        return parent.fork(environment, arguments, streams, folder or Path.cwd(), session)
