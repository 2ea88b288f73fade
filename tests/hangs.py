"""Writes what all threads do where a test hangs, in compiled code, too. A plugin of pytest.

pytest's own way starts and ends a thread for each test, which takes as long as most of them.
"""

import faulthandler
import os
import time

import pytest

_SECONDS = 290  # Less than the limit of pytest-timeout, which does nothing until a test comes back to Python.
_RENEWED_AFTER = 20

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


def pytest_unconfigure(config):
    """End the thread that waits."""
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr])
