"""What must pass before a change lands (``./dev test --gate``), and all there is (``./dev test --all``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from devtools.checks import check
from devtools.console import Failed, run_steps, say, timed
from devtools.coverage import coverage
from devtools.environment import Checkout
from devtools.passed_lanes import RECORD, has_passed, note_pass
from devtools.peer import test_peer
from devtools.processes import run
from devtools.sanitizers import sanitize
from devtools.testing import run_everything, test, test_fleet
from devtools.versions import test_versions

__all__ = ["gate", "test_all"]

_BUILDING = ("-m", "building")
_ARCHIVES = "tests/building/test_archives.py"
# Marked nightly, too.
_WITH_NIGHTLY = ("-m", "not building and not fleet", "--hypothesis-profile", "deep")


def gate(checkout: Checkout, arguments: list[str]) -> None:
    """Run what a change may break, the quick first; the first failure ends it."""
    if arguments:
        raise Failed(
            f"unknown argument of test --gate: {arguments[0]}; expected none (everything: ./dev test --all)"
        )
    os.environ["CI"] = "true"
    check(checkout, [])
    run_everything(checkout, [])
    for lane, steps in (("sanitize", sanitize), ("building", _build_archives)):
        if has_passed(checkout.root, lane):
            say(f"{lane}: passed with what it depends on as it is ({RECORD})")
        else:
            steps(checkout, [])
    say("the gate is passed")


def test_all(checkout: Checkout, arguments: list[str]) -> None:
    """Run everything, whatever has passed before, and name at the end what failed."""
    if arguments:
        raise Failed(f"unknown argument of test --all: {arguments[0]}; expected none")
    os.environ["CI"] = "true"
    steps: dict[str, Callable[[], object]] = {
        "check": lambda: check(checkout, []),
        "tests, kills, soaks and deep properties": lambda: run_everything(
            checkout, [*_WITH_NIGHTLY]
        ),
        "calls while garbage is collected often": lambda: test(checkout, ["--gc-often"]),
        "calls while threads switch often": lambda: test(checkout, ["--switch-often"]),
        "building": lambda: _build(checkout, ["tests/building"]),
        "sanitize": lambda: sanitize(checkout, []),
        "fleet": lambda: test_fleet(checkout, []),
        "versions of dependencies": lambda: test_versions(checkout, []),
        "beside Triton": lambda: test_peer(checkout, ["all"]),
        "coverage": lambda: coverage(checkout, []),
    }
    run_steps([(name, partial(_passes, step)) for name, step in steps.items()], "see above")


def _passes(step: Callable[[], object]) -> bool:
    """Return whether a command passes: it raises `Failed`, or returns an exit status, if any."""
    return not step()


def _build_archives(checkout: Checkout, arguments: list[str]) -> None:
    """Build the source archive, a wheel of it, and follow the tutorials with that in a clean environment."""
    _build(checkout, [_ARCHIVES, *arguments])
    note_pass(checkout.root, "building")


def _build(checkout: Checkout, arguments: list[str]) -> None:
    # As users do: in one process, one build after the other.
    with timed("building as users do"):
        command = [checkout.runner, "-m", "pytest", *_BUILDING, *arguments]
        if run(command, cwd=checkout.root):
            raise Failed("building as users do failed")
