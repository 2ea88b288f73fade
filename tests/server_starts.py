"""Counts the servers that tests start, prints how many a run started, and fails a run of too many."""

import os
from collections import Counter

import pytest

__all__ = ["MOST", "count"]

MOST = 120 + 20 * (os.environ.get("GPUBRIDGE_TEST_SIMCUDA") == "1")
"""Servers that a run without nightly tests may start; where there are simulated GPUs, tests/gpu starts some, too.

Share one (`running_server`, `tests.process.flag_sets`), or test in one process.
"""

_starts: Counter[str] = Counter()
_ON_WORKER = "server_starts"


def count() -> None:
    """Count the start of a server by the test that runs."""
    _starts[os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Add the counts of a worker."""
    _starts.update(getattr(node, "workeroutput", {}).get(_ON_WORKER, {}))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus) -> None:
    """Give a worker's counts to the process that controls it; fail a run that has more than it may."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_ON_WORKER] = dict(_starts)
    elif exitstatus == pytest.ExitCode.OK and _are_too_many(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the number of starts, and where most of them are if they are too many."""
    if not _starts:
        return
    terminalreporter.write_line(
        f"servers started: {_starts.total()} (at most {MOST} without nightly tests)"
    )
    if _are_too_many(terminalreporter.config):
        for path, number in _starts.most_common(20):
            terminalreporter.write_line(f"  {number:4} {path}")


def _are_too_many(config) -> bool:
    return _starts.total() > MOST and "not nightly" in config.option.markexpr
