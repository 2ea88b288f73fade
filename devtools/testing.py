"""Tests by levels: ``./dev test``, ``test-extra`` and what the gate runs in one session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from devtools.console import Failed, say, timed
from devtools.environment import Checkout, has_module, need
from devtools.extra import need_extra
from devtools.processes import run

__all__ = ["find_marked", "run_everything", "run_pytest", "test", "test_extra", "test_fleet"]

_MOST_WORKERS = "8"


def test(checkout: Checkout, arguments: list[str]) -> int:
    """Run the tests that a change may break; ``--fast`` runs fewer, ``--fleet`` others. Returns pytest's status."""
    if arguments[:1] == ["--fleet"]:
        return test_fleet(checkout, arguments[1:])
    fast = "--fast" in arguments
    need(checkout, "test", *(() if fast else ("torch",)))
    if not has_module(checkout, "torch"):
        say("no torch: the tests of the examples that use it are skipped")
    with timed("pytest"):
        status = run_pytest(checkout, checkout.runner, arguments)
    return status or (0 if arguments else _test_without_module(checkout, checkout.runner))


def test_extra(checkout: Checkout, arguments: list[str]) -> int:
    """Run the tests that `test` skips for lack of a package; return pytest's status."""
    extra = need_extra(checkout)
    files = find_marked(checkout.root, "extra")
    with timed("pytest, what is marked extra"):
        command = ["-m", "extra", *files, *arguments]
        return run_pytest(checkout, extra.runner, command, extra.variables())


def run_everything(checkout: Checkout, arguments: list[str]) -> None:
    """Run in one session all tests of a change, with each package that some need and GPUs simulated.

    Raises
    ------
    Failed
        A test failed, or none could be run.
    """
    extra = need_extra(checkout)
    need(checkout, "docs")
    variables = {**extra.variables(), "GPUBRIDGE_TEST_SIMCUDA": "1"}
    with timed("pytest, with all packages and simulated GPUs"):
        status = run_pytest(checkout, extra.runner, arguments, variables)
    status = status or _test_without_module(checkout, extra.runner)
    if status:
        raise Failed(f"tests failed, or could not be run (pytest's exit status: {status})")


def _test_without_module(checkout: Checkout, python: Path) -> int:
    """Run the tests of both runtimes of a stub on that of Python; return pytest's status."""
    marker = "both_runtimes"
    with timed("pytest, without the compiled module"):
        # Few and quick: the start of workers would take longer.
        command = [python, "-m", "pytest", "-q", "-m", marker, *find_marked(checkout.root, marker)]
        variables = {**os.environ, "GPUBRIDGE_NO_NATIVE": "1"}
        return run(command, cwd=checkout.root, variables=variables)


def test_fleet(checkout: Checkout, arguments: list[str]) -> int:
    """Run faults of fleets; return pytest's status."""
    extra = need_extra(checkout)
    with timed("pytest, fleets on Ray"):
        # One cluster at a time.
        command = [extra.runner, "-m", "pytest", "-m", "fleet", "tests/ray", *arguments]
        return run(command, cwd=checkout.root, variables=extra.variables())


def run_pytest(
    checkout: Checkout,
    python: Path,
    arguments: list[str],
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run pytest with three workers for each core, as tests of servers mostly wait; return its exit status.

    Those of ``--fast`` compute: there is one worker more than cores.
    """
    given = dict(os.environ if variables is None else variables)
    # Hundreds of servers and stubs are started: none of them shall compile the package again.
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    cores = len(os.sched_getaffinity(0))
    workers = str(cores + 1 if "--fast" in arguments else 3 * cores)
    # Files stay whole, so the fixtures of each are made once; `tests/file_order.py` has their order.
    order = ("--dist", "loadfile", "--no-loadscope-reorder")
    spread = ("-n", workers, "--maxprocesses", _MOST_WORKERS, *order)
    return run([python, "-m", "pytest", *spread, *arguments], cwd=checkout.root, variables=given)


def find_marked(root: Path, marker: str) -> list[str]:
    """Return the test files that name a marker of pytest."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(path) for path in files if f"mark.{marker}" in path.read_text()]
