"""Coverage of each package by lines and branches: ``python -m tests.coverage_table coverage.json``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePath

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def table(document: dict) -> str:
    """Return a table with a row for each folder and one for all of them."""
    packages: dict[str, Counter] = {}
    for file, found in document["files"].items():
        counts = Counter({name: found["summary"][name] for name in COUNTS})
        for name in (str(PurePath(file).parent), "all"):
            packages.setdefault(name, Counter()).update(counts)
    rows = [("package", "lines", "covered", "branches", "covered")]
    for name, counts in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0])):
        lines, covered, branches, taken = (counts[each] for each in COUNTS)
        rows.append(
            (name, str(lines), _percent(covered, lines), str(branches), _percent(taken, branches))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
