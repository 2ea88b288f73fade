"""The lane's page: what each part came to, what the driver does of each assumption, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from devtools.gpu_assumptions import ASSUMPTIONS, Assumption
from devtools.timed_parts import PASSED

__all__ = ["HOLDS", "NOT_SHOWN", "REFUTED", "Found", "findings", "page"]

HOLDS: Final = "holds"
REFUTED: Final = "DOES NOT HOLD"
NOT_SHOWN: Final = "not shown"


class Found(NamedTuple):
    """What a run has shown of an assumption, and by which results."""

    page: str
    text: str
    answer: str
    detail: str


def findings(folder: Path, parts: Sequence[Mapping[str, Any]]) -> list[Found]:
    """Return what was found of each assumption; ``parts`` are those that were run so far."""
    evidence = _Evidence(_results(folder), parts, _document(folder / "verdict.json"))
    return [
        evidence.of(where, assumption)
        for where, assumptions in ASSUMPTIONS.items()
        for assumption in assumptions
    ]


def page(call: str, folder: Path, parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the page, as Markdown."""
    lines = [f"# GPU lane: {call}", "", *_machine(folder), "## Parts", ""]
    lines += _table(
        ("part", "outcome", "seconds", "limit", ""),
        ((p["part"], p["outcome"], p["seconds"], p["limit"], p["detail"]) for p in parts),
    )
    lines += ["## Zero copies", "", *_verdict(folder), ""]
    found = findings(folder, parts)
    for where in ASSUMPTIONS:
        lines += [f"## {where}: what this driver does of what is assumed", ""]
        lines += _table(
            ("assumed", "this driver", ""), (each[1:] for each in found if each.page == where)
        )
    return "\n".join(lines)


def _results(folder: Path) -> list[dict[str, Any]]:
    """Return the lines that checks and tests have left; the last one may be cut off."""
    found = []
    path = folder / "results.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class _Evidence(NamedTuple):
    """All that a run has left so far."""

    results: Sequence[Mapping[str, Any]]
    parts: Sequence[Mapping[str, Any]]
    verdict: Mapping[str, Any]

    def of(self, where: str, assumption: Assumption) -> Found:
        """Return the worst of what is shown: that it does not hold, that it does, or nothing."""
        answers = [self._shown(*by.split(" ", 1)) for by in assumption.shown_by]
        answers = answers or [(NOT_SHOWN, "by nothing of the lane")]
        answer = next(
            each
            for each in (REFUTED, HOLDS, NOT_SHOWN)
            if any(found == each for found, _ in answers)
        )
        details = [detail for found, detail in answers if found == answer and detail]
        return Found(where, assumption.text, answer, "; ".join(details))

    def _shown(self, kind: str, name: str) -> tuple[str, str]:
        """Return what one kind of results says, and what it is."""
        ways = {"part": self._part, "check": self._check, "test": self._tests, "last": self._tests}
        return ways[kind](name) if kind in ways else self._verdict()

    def _part(self, name: str) -> tuple[str, str]:
        found = [part for part in self.parts if part["part"] == name]
        if not found:
            return NOT_SHOWN, f"{name} was not run"
        outcome = found[-1]["outcome"]
        # A program that could not begin fails, too: that refutes nothing.
        return (HOLDS, "") if outcome == PASSED else (NOT_SHOWN, f"{name}: {outcome}")

    def _check(self, name: str) -> tuple[str, str]:
        found = [result["reason"] for result in self.results if result.get("check") == name]
        refused = list(dict.fromkeys(filter(None, found)))
        if refused:
            return REFUTED, "; ".join(refused)
        return (HOLDS, "") if found else (NOT_SHOWN, "not tried")

    def _tests(self, name: str) -> tuple[str, str]:
        found = [r for r in self.results if f"tests/gpu/{name}" in r.get("test", "")]
        failed = [r["test"].rpartition("::")[2] for r in found if r["outcome"] == "failed"]
        passed = sum(r["outcome"] == "passed" for r in found)
        if failed:
            return REFUTED, f"failed: {', '.join(failed)}"
        if passed:
            return HOLDS, f"{passed} of {name}"
        return NOT_SHOWN, found[-1]["why"] if found else f"{name} was not run"

    def _verdict(self) -> tuple[str, str]:
        holds = self.verdict.get("holds")
        answer = NOT_SHOWN if holds is None else HOLDS if holds else REFUTED
        return answer, self.verdict.get("verdict", "not measured")


def _machine(folder: Path) -> list[str]:
    document = _document(folder / "zero_copy.json")
    if not document:
        names = {result["device"] for result in _results(folder) if "device" in result}
        return [f"- GPUs: {', '.join(sorted(names)) or 'unknown'}", ""]
    lines = [f"- {name}: {document.get(name)}" for name in ("device", "driver", "link", "meter")]
    return [*lines, ""]


def _verdict(folder: Path) -> list[str]:
    verdict = _document(folder / "verdict.json")
    if not verdict:
        return ["not measured"]
    return [verdict["verdict"], "", *(f"- {line}" for line in verdict["findings"])]


def _document(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in lines)
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
