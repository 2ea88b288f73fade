"""Writes what all threads do where a test hangs, in compiled code, too. A plugin of pytest.

pytest's own way starts and ends a thread for each test, which takes as long as most of them.
"""

import faulthandler
import os
import signal
import time

import pytest

_SECONDS = 290  # Less than the limit of pytest-timeout, which does nothing until a test comes back to Python.
_RENEWED_AFTER = 20
_TEARDOWN_SECONDS = 120

_stderr = pytest.StashKey()
_renewal = pytest.StashKey()


def pytest_configure(config):
    """Keep the error output, which tests have none of."""
    config.stash[_stderr] = os.dup(2)
    config.stash[_renewal] = 0.0


def pytest_runtest_protocol(item):
    """Put the time off at which the stacks are written, if that was not done lately or this test has a limit of its own."""
    stash, own = item.config.stash, item.get_closest_marker("timeout")
    if own or time.monotonic() > stash[_renewal]:
        faulthandler.dump_traceback_later(own.args[0] if own else _SECONDS, file=stash[_stderr])
        stash[_renewal] = 0.0 if own else time.monotonic() + _RENEWED_AFTER


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Limit each wait of a teardown: pytest-timeout limits one, and none of a test that failed."""
    is_left = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if is_left:
        signal.signal(signal.SIGALRM, _end_wait)
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, seconds or _TEARDOWN_SECONDS, _TEARDOWN_SECONDS)
    try:
        return (yield)
    finally:
        if is_left:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _end_wait(*_):
    pytest.fail(f"the teardown of a test waits for more than {_TEARDOWN_SECONDS} s")


def pytest_unconfigure(config):
    """End the thread that waits."""
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr])
