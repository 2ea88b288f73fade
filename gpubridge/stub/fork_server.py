"""A process that has made a stub's imports and forks stubs, each of which starts without imports.

The server talks to it by `gpubridge.engine.supervisor.fork_servers`. It has one thread and holds nothing but
modules: no model, no memory of the server, no GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from gpubridge.parent_death import die_with
from gpubridge.transport.fork_requests import DESCRIPTORS, MARK, NOT_FORKED, READY

__all__ = ["fork_stubs"]

_TITLE = ("gpubridge-forks",)
_MESSAGE_BYTES = 1 << 16
_LOOK_AGAIN_SECONDS = 0.0005
_PID_BYTES = 8
_THREADED = re.compile(rb"/lib(?:mkl|iomp|gomp|omp|tbb)[^/]*$", re.MULTILINE)
"""Libraries that may hang after a fork if they had threads; OpenBLAS starts its threads again."""


def fork_stubs(
    control_fd: int, server_pid: int, state_of_imports: Callable[[], Any], imported: Any
) -> int:
    """Fork a stub for each message of the server; return in each, with its channel's descriptor.

    A message has the stub's ``mark`` and its command line (``words``), and the descriptors of its channel,
    its standard output and standard error, and a pipe. The answer is the stub's process id. The stub begins
    with the pipe's byte and ends at once with the pipe's end: the server decides whether it becomes one.
    The process ends with the server, and when what stubs import may have changed.

    - ``control_fd``: descriptor of a SOCK_SEQPACKET socket.
    - ``server_pid``: the server, which adopts orphans (PR_SET_CHILD_SUBREAPER).
    - ``imported``: what ``state_of_imports`` returned before the imports.
    """
    die_with(server_pid)
    if threading.active_count() > 1 or _THREADED.search(_read("/proc/self/maps")):
        sys.exit(1)
    # An inherited SIG_IGN would lose the ends of children.
    on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = socket.socket(fileno=control_fd)
    shown = _ShownNames()
    # What is frozen is not searched by collections, which would copy its pages.
    gc.collect()
    gc.freeze()
    control.send(READY)
    while True:
        message, fds, _, _ = socket.recv_fds(
            control, _MESSAGE_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not message:
            sys.exit(0)
        pid: int | None = None
        # A package that was installed meanwhile would be missing in the stub, or be of two versions.
        current = state_of_imports() == imported
        if current and len(fds) == DESCRIPTORS:
            pid = _fork_adopted()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, on_child)
            channel, out, err, begin = fds
            _become_stub(shown, out, err, **json.loads(message))
            if not os.read(begin, 1):
                os._exit(0)
            os.close(begin)
            return channel
        for fd in fds:
            os.close(fd)
        control.send(NOT_FORKED if pid is None else b"%d" % pid)
        if not current:
            sys.exit(0)


def _fork_adopted() -> int | None:
    """Fork a process that the server adopts, as its parent ends; return 0 in it, here its id.

    The server can wait for it, and the kernel kills it with the server, as if that had started it. None if
    no process can be made.
    """
    told = mmap.mmap(-1, _PID_BYTES)
    try:
        between = _fork()
        if between == 0:
            _fork_and_exit(told)
            return 0
        os.waitpid(between, 0)
        return int.from_bytes(told[:], "little") or None
    except OSError:
        return None
    finally:
        # In the stub, too: it shares no memory with others.
        told.close()


def _fork_and_exit(told: mmap.mmap) -> None:
    """Fork once more, and return there once this process has ended."""
    between = os.getpid()
    try:
        pid = _fork()
    except OSError:
        os._exit(1)
    if pid:
        told[:] = pid.to_bytes(_PID_BYTES, "little")
        os._exit(0)
    while os.getppid() == between:
        time.sleep(_LOOK_AGAIN_SECONDS)


def _fork() -> int:
    with warnings.catch_warnings():
        # Since Python 3.12 for any thread, here OpenBLAS's, which ends them before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_stub(shown: _ShownNames, out: int, err: int, mark: str, words: list[str]) -> None:
    """Make this process what one is that the server starts as a stub."""
    os.setsid()
    for standard, fd in ((1, out), (2, err)):
        os.dup2(fd, standard)
        os.close(fd)
    shown.become(mark, words)
    os.environ[MARK] = mark
    sys.orig_argv = words
    importlib.invalidate_caches()
    # Python's own generator has a seed of its own after a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


class _ShownNames:
    """Names that the system shows of this process: its own, its command line, the variable `MARK`.

    The kernel reads the two latter in the process's memory, where they are overwritten.
    """

    def __init__(self) -> None:
        # Fields 48 to 51 of proc(5), of which the first two are before the parenthesis.
        words = _read("/proc/self/stat").rpartition(b")")[2].split()
        start, end, variables, variables_end = map(int, words[45:49])
        self._words, self._word_bytes = start, end - start
        text = b"\0" + ctypes.string_at(variables, variables_end - variables)
        self._mark = variables + text.index(b"\0%s=" % MARK.encode()) + len(MARK) + 1
        self._show_words(_TITLE)

    def become(self, mark: str, words: Sequence[str]) -> None:
        """Show the names of a stub; marks are of one length."""
        with open("/proc/self/comm", "w") as name:
            name.write(os.path.basename(sys.executable))
        ctypes.memmove(self._mark, mark.encode(), len(mark))
        self._show_words(words)

    def _show_words(self, words: Sequence[str]) -> None:
        text = "\0".join(words).encode()[: self._word_bytes - 1]
        ctypes.memmove(self._words, text.ljust(self._word_bytes, b"\0"), self._word_bytes)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
