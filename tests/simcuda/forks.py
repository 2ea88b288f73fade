"""Processes that begin as copies of one that has imported what they need: each costs a fork, no imports."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO

__all__ = ["Fork", "fork"]

# What a process reads once, before its program runs.
_AT_ITS_START = ("LD_", "PYTHON", "OPENBLAS_")

# Only imports: no driver, no thread, nothing that a copy of the process would share.
_PROGRAM = """
import ctypes, gc, json, os, select, signal, socket, sys, threading
from cuda.bindings import driver as d
import gpubridge.cuda_ipc.device_check
import gpubridge.host_shm, gpubridge.transport.control, gpubridge.transport.stub_settings
import gpubridge.stub.device.memory

def become_one_of_many():
    # Forks for each request, and returns in the forks.
    control = socket.socket(fileno=int(sys.argv.pop()))
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
                os.write(end, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(end)
        if control not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            sys.exit()
        message = json.loads(message)
        if isinstance(message, int):
            if message in ends:
                os.kill(message, signal.SIGKILL)
            continue
        source, target, end = fds
        pid = os.fork()
        if pid:
            ends[pid] = end
            os.close(source)
            os.close(target)
            control.send(b"%d" % pid)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for fd in (woken, wake, end, *ends.values()):
            os.close(fd)
        for standard, fd in ((0, source), (1, target)):
            os.dup2(fd, standard)
            os.close(fd)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        os.environ.clear()
        os.environ.update(message)
        return

gc.freeze()
become_one_of_many()
"""

_parents: dict[tuple[str, ...], _Parent] = {}
_lock = threading.Lock()


class Fork:
    """A process with pipes for its input and output, of which this process has the other ends."""

    def __init__(self, parent: _Parent, pid: int, stdin: int, stdout: int, end: int) -> None:
        self.pid = pid
        self.stdin: IO[str] = open(stdin, "w")  # noqa: SIM115
        self.stdout: IO[str] = open(stdout)  # noqa: SIM115
        self._parent = parent
        self._end = end
        self._exit_code: int | None = None

    def wait(self) -> int:
        """Wait until it is gone; return its exit code, as `subprocess` has it."""
        if self._exit_code is None:
            told = os.read(self._end, 16)
            assert told, "the process that forks has ended"
            self._exit_code = int(told)
        return self._exit_code

    def kill(self) -> None:
        """Kill it, if it is still there, and wait until it is gone."""
        if self._exit_code is None:
            self._parent.kill(self.pid)
        self.wait()

    def close(self) -> None:
        """Kill it, and close the pipes."""
        self.kill()
        os.close(self._end)
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


class _Parent:
    """A process that forks; it ends with this one."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM + program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        atexit.register(self._close)

    def fork(self, environment: Mapping[str, str]) -> Fork:
        source, stdin = os.pipe()
        stdout, target = os.pipe()
        end, told = os.pipe()
        try:
            socket.send_fds(
                self._control, [json.dumps(environment).encode()], [source, target, told]
            )
            answer = self._control.recv(16)
        finally:
            for fd in (source, target, told):
                os.close(fd)
        assert answer, "the process that forks has ended"
        return Fork(self, int(answer), stdin, stdout, end)

    def kill(self, pid: int) -> None:
        # Only it knows whether the number is still that of a fork.
        self._control.send(b"%d" % pid)

    def _close(self) -> None:
        self._control.close()
        self._process.wait()


def fork(program: str, environment: Mapping[str, str]) -> Fork:
    """Run a program in a fork of a process that has made the usual imports, and stays for the next one.

    Parameters
    ----------
    program : str
        Runs after those imports.
    environment : mapping
        All of its environment.
    """
    read = sorted(name for name in environment if name.startswith(_AT_ITS_START))
    key = (program, *(f"{name}={environment[name]}" for name in read))
    with _lock:
        if key not in _parents:
            _parents[key] = _Parent(program, environment)
        return _parents[key].fork(environment)
