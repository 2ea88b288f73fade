"""The Python stack of a process that crashes, on what its standard error was at the start."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl

_STDERR = 2
_LEAST_DESCRIPTOR = 64
"""The descriptor of its own is away from those that a model closes or replaces."""


def report_crashes() -> None:
    """Have SIGSEGV, SIGBUS, SIGFPE, SIGABRT and SIGILL write the crashing thread's stack before they end the process.

    A model may replace ``sys.stderr`` and close descriptor 2. Handlers that are there, or come later, stay.
    """
    if faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError):
        # Never closed: the handlers write to it until the end of the process.
        descriptor = fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, _LEAST_DESCRIPTOR)
        faulthandler.enable(descriptor, all_threads=False)
