"""The surroundings that a server starts in: signals that its parent blocked, and limits that leave it no room."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gpubridge.errors import unavailable


class _Limit(NamedTuple):
    """A limit of this process, and the least that a server with one model works with.

    ``flag``: that of the shell's ``ulimit``, which counts in ``unit`` bytes or pieces.
    """

    kind: int
    least: int
    unit: int
    flag: str
    what: str


_LIMITS = (
    _Limit(resource.RLIMIT_NOFILE, 32, 1, "-n", "open files"),
    _Limit(resource.RLIMIT_AS, 256 << 20, 1024, "-v", "KiB of addresses"),
    # The memory that a server shares with a process of a model is such a file.
    _Limit(resource.RLIMIT_FSIZE, 16 << 20, 1024, "-f", "KiB for a file"),
)


def check_limits() -> None:
    """Raise UNAVAILABLE where a limit would end the server somewhere in its start.

    Called before the imports that need memory and files. The number of open files is raised to its hard limit.
    """
    for limit in _LIMITS:
        soft, hard = resource.getrlimit(limit.kind)
        if soft == resource.RLIM_INFINITY or soft >= limit.least:
            continue
        if limit.kind == resource.RLIMIT_NOFILE and (
            hard == resource.RLIM_INFINITY or hard >= limit.least
        ):
            # More are taken once it is known how many connections there may be.
            resource.setrlimit(limit.kind, (limit.least, hard))
            continue
        raise unavailable(
            f"this process may have {soft // limit.unit} {limit.what} (ulimit {limit.flag}): a server needs at "
            f"least {limit.least // limit.unit}; raise the limit"
        )


@contextmanager
def own_signals() -> Iterator[None]:
    """Handle signals as if no parent had blocked or ignored them, for this process and those it starts.

    Call it on the main thread. A process inherits both; without SIGCHLD the exit codes of stubs are lost.
    """
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ended = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, ended)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
