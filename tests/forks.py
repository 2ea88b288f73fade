"""Processes that begin as copies of one that has imported what they need: each costs a fork, no imports.

Those that fork are shared by all workers of a run of tests, and end with it: one of them, the first, starts
the others. A plugin of pytest.
"""

from __future__ import annotations

import atexit
import hashlib
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

import pytest

from tests import run_folder

__all__ = ["Fork", "adopt", "execute", "fork"]

# What a process, or a library while it is loaded, reads once.
_AT_ITS_START = (
    *("LD_", "PYTHON", "OPENBLAS_", "OMP_", "LC_", "LANG", "TZ", "GLIBC_", "MALLOC_"),
    "GPUBRIDGE_NO_NATIVE",
)

# A process that takes longer to fork, or to be gone once it is killed, never will.
_SECONDS = 60

_PROGRAM = """
import atexit, contextlib, gc, json, os, select, shutil, signal, socket, sys, threading

read = {}

class Noted(os._Environ):
    # Notes what imports read, and a fork does not read again.
    def __getitem__(self, name):
        read[name] = None
        read[name] = super().__getitem__(name)
        return read[name]

def become_one_of_many():
    # Forks for each request, and returns in the forks.
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # It ends with the process that started it: the first one with a pipe.
    first = sys.argv.pop()
    life = int(first) if first else os.pidfd_open(os.getppid())
    told_to_end = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.append(1))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Pipes by process, codes of those that are gone, and processes by the connection with which they end.
    ends, codes, clients = {}, {}, {}

    def tell(pid):
        for end in ends.pop(pid):
            with contextlib.suppress(BrokenPipeError):
                os.write(end, b"%d" % codes[pid])
            os.close(end)

    def end(pids):
        for pid in ends.keys() & pids:
            os.kill(pid, signal.SIGKILL)

    while True:
        ready, _, _ = select.select([listener, life, woken, *clients], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while ends:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                codes[pid] = os.waitstatus_to_exitcode(status)
                tell(pid)
        if life in ready or told_to_end:
            for pid in ends:
                os.kill(pid, signal.SIGTERM if first else signal.SIGKILL)
            while ends:
                ends.pop(os.wait()[0], None)
            if first:
                shutil.rmtree(sys.argv.pop(), ignore_errors=True)
            sys.exit()
        if listener in ready:
            client, _ = listener.accept()
            client.send(json.dumps(read).encode())
            clients[client] = set()
        for client in clients.keys() & ready:
            message, fds, _, _ = socket.recv_fds(client, 1 << 20, 4)
            if not message:
                # Whoever asked for them is gone.
                end(clients.pop(client))
                client.close()
                continue
            message = json.loads(message)
            if "signal" in message:
                if message["pid"] in ends:
                    os.kill(message["pid"], message["signal"])
                continue
            *streams, told = fds
            if "pid" in message:
                pid = message["pid"]
                ends.setdefault(pid, []).append(told)
                if pid in codes:
                    tell(pid)
                continue
            pid = os.fork()
            if pid:
                codes.pop(pid, None)
                ends[pid] = [told]
                if not message["stays"]:
                    clients[client].add(pid)
                for fd in streams:
                    os.close(fd)
                client.send(b"%d" % pid)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for each in (listener, *clients):
                each.close()
            for fd in (life, woken, wake, told, *sum(ends.values(), [])):
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

_EXECUTE = "os.execv(sys.argv[1], sys.argv[1:])"

_parents: dict[Path, _Parent] = {}
"""Connections by the path of their socket: a folder for each program and what a process reads at its start."""
_lock = threading.Lock()


class Fork:
    """A forked process; attributes and methods are as those of `subprocess.Popen`.

    ``parent`` is the socket of the process that forked it, of which others of the run can `adopt` it.
    """

    def __init__(self, parent: _Parent, pid: int, end: int) -> None:
        self.pid = pid
        self.parent = parent.path
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
        if self._end >= 0:
            try:
                self.kill()
                self.wait(_SECONDS)
            finally:
                self.let_go()

    def let_go(self) -> None:
        """Leave it to others of the run; only `close` may follow, and has no effect."""
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
    """A connection to a process that forks, which ends with the run; forks end with the connection unless they stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_SECONDS)
        self._control.connect(str(path))
        atexit.register(self._control.close)
        told = self._control.recv(1 << 16)
        assert told, "the process that forks ended before its first fork"
        self._read: dict[str, str | None] = json.loads(told)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Return whether its imports would have read the same in an environment."""
        return all(environment.get(name) == value for name, value in self._read.items())

    def fork(self, message: Mapping[str, object], streams: Sequence[int]) -> Fork:
        end = self._send_end(message, streams)
        answer = self._control.recv(16)
        assert answer, "the process that forks has ended"
        return Fork(self, int(answer), end)

    def adopt(self, pid: int) -> Fork:
        return Fork(self, pid, self._send_end({"pid": pid}, ()))

    def signal(self, pid: int, number: int) -> None:
        # Only it knows whether the number is still that of a fork.
        self._control.send(json.dumps({"pid": pid, "signal": number}).encode())

    def _send_end(self, message: Mapping[str, object], streams: Sequence[int]) -> int:
        end, told = os.pipe()
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], [*streams, told])
        finally:
            os.close(told)
        return end


def _first() -> _Parent:
    """Return the connection to the process that starts all others of the run; start it if there is none."""
    path = run_folder.path() / "forks"
    if path not in _parents:
        if not path.exists():
            source, life = os.pipe()
            with _listener(path) as listener:
                words = ["-c", _program("", _EXECUTE), str(run_folder.path()), str(source)]
                process = subprocess.Popen(
                    [sys.executable, *words],
                    stdin=listener, stdout=subprocess.DEVNULL, pass_fds=(source,),
                )  # fmt: skip
            os.close(source)
            atexit.register(_end_first, process, life)
        _parents[path] = _Parent(path)
    return _parents[path]


def _end_first(process: subprocess.Popen[bytes], life: int) -> None:
    os.close(life)
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _start_parent(path: Path, program: str, environment: Mapping[str, str]) -> _Parent:
    with _listener(path) as listener, Path(os.devnull).open("w") as nothing:
        streams = listener.fileno(), nothing.fileno(), 2
        message = _message(environment, [sys.executable, "-c", program, ""], stays=True)
        _first().fork(message, streams).let_go()
    return _Parent(path)


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def _program(imports: str, program: str) -> str:
    inner = textwrap.indent(program, "    ").lstrip()
    return _PROGRAM.replace("{imports}", imports).replace("{program}", inner)


def _message(
    environment: Mapping[str, str],
    arguments: Sequence[str],
    folder: Path | None = None,
    *,
    session: bool = False,
    stays: bool = False,
) -> Mapping[str, object]:
    return {
        "environment": dict(environment),
        "folder": str(folder or Path.cwd()),
        "arguments": ["", *arguments],
        "session": session,
        "stays": stays,
    }


def _fitting(folder: Path, program: str, environment: Mapping[str, str]) -> _Parent:
    for path, parent in _parents.items():
        if path.parent == folder and parent.fits(environment):
            return parent
    folder.mkdir(exist_ok=True)
    with run_folder.locked(folder.with_suffix(".lock")):
        there = set(folder.iterdir())
        for path in there - _parents.keys():
            _parents[path] = _Parent(path)
            if _parents[path].fits(environment):
                return _parents[path]
        path = folder / str(len(there))
        _parents[path] = _start_parent(path, program, environment)
        return _parents[path]


def adopt(parent: Path, pid: int) -> Fork:
    """Return a process of the run that `fork` has made, with ``stays``, in whatever worker."""
    with _lock:
        if parent not in _parents:
            _parents[parent] = _Parent(parent)
        return _parents[parent].adopt(pid)


def fork(
    imports: str,
    program: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    *,
    session: bool = False,
    stays: bool = False,
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
    stays : bool
        Whether it ends only with the run, not with this process.
    """
    read = sorted(name for name in environment if name.startswith(_AT_ITS_START))
    source = _program(imports, program)
    key = "\0".join([source, *(f"{name}={environment[name]}" for name in read)])
    named = run_folder.path() / f"forks-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    message = _message(environment, arguments, folder, session=session, stays=stays)
    with _lock:
        return _fitting(named, source, environment).fork(message, streams)


def execute(
    words: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    *,
    stays: bool = False,
) -> Fork:
    """Start the interpreter with these arguments; all else is as `fork` has it."""
    message = _message(environment, [sys.executable, *words], stays=stays)
    with _lock:
        return _first().fork(message, streams)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node() -> None:
    """Start the first process before the workers, each of which may need it, and which end earlier."""
    _first()
