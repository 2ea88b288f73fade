"""Repetitions of tests beside a load on all cores, to find those that race: ``./dev stress``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devtools.console import Failed, say, timed
from devtools.environment import Checkout, need
from devtools.testing import run_pytest

__all__ = ["failures_of", "load", "stress", "table"]

_TESTS_FAILED = 1
# Ends by itself when its time is over, or its parent is gone: nobody has to look for it.
_BUSY = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    sum(range(100_000))
"""


def stress(checkout: Checkout, arguments: list[str]) -> int:
    """Repeat tests beside a load; print failures by test. Returns 1 where there was one."""
    parser = argparse.ArgumentParser(prog="./dev stress", allow_abbrev=False)
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="repetitions")
    parser.add_argument(
        *("--seconds", "-S"), type=int, default=3600, help="no repetition begins after so many"
    )
    options, tests = parser.parse_known_args(arguments)
    need(checkout, "test", "torch")
    place = checkout.root / "build" / "stress"
    place.mkdir(parents=True, exist_ok=True)
    failures: Counter[str] = Counter()
    repetitions, end = 0, time.monotonic() + options.seconds
    with load(os.cpu_count() or 1, options.seconds):
        while repetitions < options.repeat and time.monotonic() < end:
            repetitions += 1
            with timed(f"repetition {repetitions} of {options.repeat}"):
                failures.update(_repeat(checkout, tests, place / f"{repetitions}.xml"))
    print(table(failures, repetitions), flush=True)
    return int(bool(failures))


def _repeat(checkout: Checkout, tests: list[str], report: Path) -> set[str]:
    """Run the tests once; return those that failed."""
    report.unlink(missing_ok=True)
    options = ["-q", "--no-header", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command = [*options, *(tests or ["tests/process"])]
    status = run_pytest(checkout, checkout.runner, command)
    failed = failures_of(report) if report.exists() else set()
    if status and not (status == _TESTS_FAILED and failed):
        raise Failed(f"pytest ended with status {status} and named no test that failed")
    return failed


def failures_of(report: Path) -> set[str]:
    """Return the tests that failed, as a report in JUnit's form names them."""
    cases = ElementTree.parse(report).iter("testcase")
    failed = [case for case in cases if {each.tag for each in case} & {"failure", "error"}]
    return {f"{case.get('file') or case.get('classname')}::{case.get('name')}" for case in failed}


def table(failures: Counter[str], repetitions: int) -> str:
    """Return a line for each test that failed, most often first."""
    if not failures:
        return f"{repetitions} repetitions, no failure"
    lines = [f"failed, of {repetitions} repetitions:"]
    return "\n".join([*lines, *(f"{count:4d}  {test}" for test, count in failures.most_common())])


@contextmanager
def load(cores: int, seconds: float) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep cores busy for so long at most; end the processes, which are this function's own, behind the block."""
    command = [sys.executable, "-I", "-c", _BUSY, str(os.getpid()), str(seconds)]
    say(f"a load on {cores} cores, for {seconds:.0f} s at most")
    processes = [subprocess.Popen(command) for _ in range(cores)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
