"""Results of the lane, one line of JSON each, written as they come: an interrupted run leaves what it had."""

import json
import os
from pathlib import Path

from devtools.gpu_parts import RESULTS

_MOST = 2000


def add_result(**fields):
    """Add a line to the file that the lane names, if it names one."""
    path = os.environ.get(RESULTS)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(fields) + "\n")


def add_report(report):
    """Add what a test, or the collection of a file, came to; parts of a test that only prepare it do not count."""
    # Workers tell the process that collects their reports.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    when = getattr(report, "when", "collect")
    if report.passed and when != "call":
        return
    told = report.longrepr
    why = told[2] if isinstance(told, tuple) else str(told or "")
    add_result(test=report.nodeid, when=when, outcome=report.outcome, why=why[-_MOST:])
