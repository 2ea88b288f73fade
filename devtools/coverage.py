"""Lines and branches that the tests reach, by packages, and the floors below which none may fall: ``./dev coverage``."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from devtools.console import Failed, say, timed
from devtools.environment import Checkout
from devtools.extra import need_extra
from devtools.processes import run
from devtools.testing import run_pytest

__all__ = ["Shares", "coverage", "fallen", "raised", "shares_of", "table"]

FLOORS = PurePath("tests", "coverage_floors.json")
"""The floors, in the repository: written by a run that measured more, compared by each."""
TOLERANCE = 0.5
"""In points: the schedules of processes differ from run to run."""
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
Shares = dict[str, list[float]]
"""Each package's shares of lines and branches that were reached, in percent."""


def coverage(checkout: Checkout, arguments: list[str]) -> None:
    """Measure every test, also in the processes that tests start; compare with the floors where all were run."""
    extra = need_extra(checkout)
    place = checkout.root / "build" / "coverage"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    variables = {**extra.variables(), "COVERAGE_FILE": str(place / "data")}
    # Each Python process that finds this measures itself.
    measuring = {**variables, "COVERAGE_PROCESS_START": str(checkout.root / "pyproject.toml")}
    with timed("pytest, measured"):
        command = ["-p", "no:cacheprovider", *arguments]
        if run_pytest(checkout, extra.runner, command, measuring):
            # Measured processes start and end later than some tests wait: what passes is for test to tell.
            say("some tests failed while they were measured")
    program = [extra.runner, "-m", "coverage"]
    # Of killed processes the data may be cut short.
    combine = [*program, "combine", "-q", place]
    if run(combine, cwd=checkout.root, variables=variables, quiet=True):
        raise Failed("nothing was measured")
    report = place / "coverage.json"
    run([*program, "json", "-q", "-o", report], cwd=checkout.root, variables=variables)
    document = json.loads(report.read_text())
    print(table(document), flush=True)
    if not arguments:
        _compare(checkout.root / FLOORS, shares_of(document))


def _compare(path: Path, measured: Shares) -> None:
    """Raise `Failed` where a package fell below its floor; write floors that were raised."""
    floors: Shares = json.loads(path.read_text()) if path.exists() else {}
    low = fallen(measured, floors)
    if low:
        raise Failed(f"less is tested than before ({path.name}): {'; '.join(low)}")
    higher = raised(measured, floors)
    if higher != floors:
        path.write_text(json.dumps(higher, indent=1, sort_keys=True) + "\n")
        say(f"floors were raised: commit {path}")


def fallen(measured: Shares, floors: Shares) -> list[str]:
    """Return a text for each package that is tested less than its floor says."""
    texts = []
    for package, floor in sorted(floors.items()):
        for what, least, share in zip(
            ("lines", "branches"), floor, measured.get(package, floor), strict=True
        ):
            if share < least - TOLERANCE:
                texts.append(f"{package}: expected {least:.1f} % of {what}, got {share:.1f} %")
    return texts


def raised(measured: Shares, floors: Shares) -> Shares:
    """Return the floors of the next run: the highest shares of the packages that there are."""
    return {
        package: [max(pair) for pair in zip(shares, floors.get(package, shares), strict=True)]
        for package, shares in measured.items()
    }


def shares_of(document: Mapping[str, Any]) -> Shares:
    """Return the shares that coverage's JSON report tells."""
    return {
        package: [
            _percent(counts["covered_lines"], counts["num_statements"]),
            _percent(counts["covered_branches"], counts["num_branches"]),
        ]
        for package, counts in _counts(document).items()
    }


def table(document: Mapping[str, Any]) -> str:
    """Return a table with a row for each package and one for all of them."""
    shares = shares_of(document)
    rows: list[tuple[str, ...]] = [("package", "lines", "covered", "branches", "covered")]
    for name, counts in sorted(
        _counts(document).items(), key=lambda item: (item[0] == "all", item[0])
    ):
        lines, branches = shares[name]
        cells = str(counts["num_statements"]), lines, str(counts["num_branches"]), branches
        rows.append(
            (name, *(f"{cell:.1f} %" if isinstance(cell, float) else cell for cell in cells))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _counts(document: Mapping[str, Any]) -> dict[str, Counter[str]]:
    packages: dict[str, Counter[str]] = {}
    for file, found in document["files"].items():
        counts = Counter({name: found["summary"][name] for name in _COUNTS})
        for name in (str(PurePath(file).parent), "all"):
            packages.setdefault(name, Counter()).update(counts)
    return packages


def _percent(part: int, whole: int) -> float:
    """Return a share in percent, of which a tenth is told; of nothing, all is reached."""
    return round(100 * part / whole, 1) if whole else 100.0
