"""Processes on a simulated machine that do as they are told: Python statements, and what they answer."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest

from tests.forks import Fork, fork
from tests.simcuda.machine import Machine

_STOP_SECONDS = 60
_IMPORTS = """
import ctypes, threading
from cuda.bindings import driver as d
import gpubridge.cuda_ipc.device_check
import gpubridge.host_shm, gpubridge.transport.control, gpubridge.transport.stub_settings
import gpubridge.stub.device.memory
"""
# `d` is the driver; `ok` checks a call and gives its value; `told` is what the test has sent.
_PROGRAM = """
def ok(answer):
    assert int(answer[0]) == 0, answer[0].name
    return answer[1] if len(answer) == 2 else answer[1:]

def start(device=0):
    ok(d.cuInit(0))
    ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(device))))

def read(pointer, nbytes):
    target = bytearray(nbytes)
    ok(d.cuMemcpyDtoH(target, int(pointer), nbytes))
    return bytes(target)

def fill(pointer, value, nbytes, stream=0):
    ok(d.cuMemsetD8Async(int(pointer), value, nbytes, stream))

released = threading.Event()

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def gate(_):
    released.wait()

def hold(stream):
    # What follows on the stream waits for `released`.
    ok(d.cuLaunchHostFunc(stream, ctypes.cast(gate, ctypes.c_void_p).value, 0))

def raw(handle):
    return list(ctypes.string_at(handle.getPtr(), 64))

def made(kind, numbers):
    handle = kind()
    ctypes.memmove(handle.getPtr(), bytes(numbers), 64)
    return handle

def listen(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener

def send(path, fd):
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(path)
        socket.send_fds(to, [b"x"], [fd])

def take(listener):
    taken, _ = listener.accept()
    with taken, listener:
        return socket.recv_fds(taken, 1, 1)[1][0]

scope = dict(globals())
for line in sys.stdin:
    code, told = json.loads(line)
    scope["told"] = told
    scope["answer"] = None
    try:
        exec(code, scope)
        print(json.dumps(["answer", scope["answer"]]), flush=True)
    except Exception as error:
        print(json.dumps(["error", f"{type(error).__name__}: {error}"]), flush=True)
"""


class Worker:
    """A process on a machine."""

    def __init__(self, process: Fork, stdin: IO[str], stdout: IO[str]) -> None:
        self._process = process
        self._stdin = stdin
        self._stdout = stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, code: str, told: object = None) -> object:
        """Run statements; return what they have put into ``answer``; raise what they raise."""
        self._stdin.write(json.dumps([code, told]) + "\n")
        self._stdin.flush()
        line = self._stdout.readline()
        if not line:
            raise EOFError(f"the process ended with {self._process.wait(_STOP_SECONDS)}")
        kind, value = json.loads(line)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def refuses(self, error: str, code: str, told: object = None) -> None:
        """Run statements, which end with an error."""
        with pytest.raises(RuntimeError, match=error):
            self.do(code, told)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self._process.kill()
        self._process.wait(_STOP_SECONDS)

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self._process.close()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def start_worker(environment: Mapping[str, str]) -> Worker:
    """Start a process with such an environment."""
    source, stdin = os.pipe()
    stdout, target = os.pipe()
    try:
        process = fork(_IMPORTS, _PROGRAM, environment, (source, target, 2))
    finally:
        os.close(source)
        os.close(target)
    return Worker(process, os.fdopen(stdin, "w"), os.fdopen(stdout))


@contextlib.contextmanager
def running_worker(
    machine: Machine, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Start a process on a machine, and end it."""
    worker = start_worker({**machine.environment(), **(environment or {})})
    try:
        yield worker
    finally:
        worker.close()


def hand_over(giver: Worker, fd: str, taker: Worker, path: Path) -> None:
    """Have a process send a descriptor, which an expression gives, to another one, as ``fd`` there.

    ``path`` is that of a socket, where nothing is yet.
    """
    taker.do("listener = listen(told)", str(path))
    giver.do(f"send(told, {fd})", str(path))
    taker.do("fd = take(listener); del listener")
