"""The table of the README, from the recorded results: ``python -m benchmarks.readme`` writes it anew."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.figures import RESULTS
from benchmarks.peers.servers import PEERS
from benchmarks.varied_rows import OWN_ROWS, ROWS, START_ROWS
from benchmarks.varied_table import OwnResult, Result, number

__all__ = ["README", "replaced", "section"]

README = RESULTS.parent.parent / "README.md"
_BEGIN, _END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"

# Works of `benchmarks.peers`, and rows of `benchmarks.varied`; the first stands in for it where there is no run of peers.
_OF_PEERS = {
    "add_sub": "JSON in and out, 16 connections",
    "means": "a JPEG of 100 KB to a Pillow model",
    "tokens": "a stream of 100 tokens, each",
}
_JSON_ROW = "json_add_sub"
_OF_VARIED = {
    _JSON_ROW: _OF_PEERS["add_sub"],
    "add_sub_ids": "small binary requests, HTTP, 16 connections",
    "fp32_600k_http_4": "600 KB in and out, HTTP, 4 connections",
    "bls_1": "a model that calls another one (BLS)",
}

Document = Mapping[str, Any]


def section(varied: Document, peers: Document | None) -> str:
    """Return the README's part on figures, without its marks, of a run of varied traffic and one of peers."""
    machine = varied["machine"]
    runs = f"[varied traffic](benchmarks/results/varied.md) ({_run(varied)})"
    if peers is not None:
        runs = f"[other servers](benchmarks/results/peers.md) ({_run(peers)}) and {runs}"
    opening = (
        f"CPU time of a server and all its processes for a request, and the rate; every request with new bytes, on "
        f"{machine['cores']} cores of an {machine['cpu'].replace('(R)', '').removesuffix(' Processor')} that the client "
        f"shared. The ratio is Triton's CPU over gpubridge's. From {runs}; "
        "[what is unfair](benchmarks/README.md#what-is-unfair-and-to-whom):"
    )
    names = [] if peers is None else [server.name for server in PEERS]
    lines = [
        opening,
        "",
        *_table(names, [*_peer_rows(peers, names), *_varied_rows(varied, peers, names)]),
    ]
    missed = list(_missed(varied))
    if missed:
        lines += ["", f"Not reached in that run: {'; '.join(missed)}."]
    return "\n".join(lines) + "\n"


def replaced(readme: str, text: str) -> str:
    """Return a README with another section between its marks."""
    before, _, rest = readme.partition(f"{_BEGIN}\n")
    return f"{before}{_BEGIN}\n{text}{_END}{rest.partition(_END)[2]}"


def recorded() -> str:
    """Return the section of the results in the repository."""
    varied, peers = RESULTS / "varied.json", RESULTS / "peers.json"
    found = json.loads(peers.read_text()) if peers.exists() else None
    return section(json.loads(varied.read_text()), found)


def main() -> None:
    """Write the README's section anew."""
    README.write_text(replaced(README.read_text(), recorded()))


def _run(about: Document) -> str:
    return (
        f"commit {about['commit'][:7]}; {about['rounds']} rounds of {about['seconds']} s, in turn"
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    headings = ["work", "gpubridge", "Triton", "", *names]
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return [f"| {' | '.join(line)} |" for line in (headings, marks, *rows)]


def _peer_rows(peers: Document | None, names: Sequence[str]) -> Iterator[list[str]]:
    rows = [] if peers is None else peers["rows"]
    for work, title in _OF_PEERS.items():
        found = {row["server"]: _medians(row["samples"]) for row in rows if row["work"] == work}
        if found:
            yield _cells(title, [found.get(name) for name in ("gpubridge", "Triton", *names)])


def _varied_rows(
    varied: Document, peers: Document | None, names: Sequence[str]
) -> Iterator[list[str]]:
    found = {row["name"]: row for row in varied["rows"]}
    for name, title in _OF_VARIED.items():
        if name in found and not (name == _JSON_ROW and peers is not None):
            sides = [_medians(found[name][side]) for side in ("gpubridge", "triton")]
            yield _cells(title, [*sides, *[None] * len(names)])


def _medians(samples: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """Return the CPU time and the rate of the rounds; None without rounds."""
    if not samples:
        return None
    cpu, rate = (
        statistics.median(each[figure] for each in samples) for figure in ("cpu_us", "rate")
    )
    return cpu, rate


def _cells(title: str, sides: Sequence[tuple[float, float] | None]) -> list[str]:
    shown = [
        "–" if side is None else f"{number(side[0])} µs ({number(side[1])}/s)" for side in sides
    ]
    ours, theirs = sides[:2]
    times = "–" if ours is None or theirs is None else f"**{theirs[0] / ours[0]:.1f}×**"
    return [title, *shown[:2], times, *shown[2:]]


def _missed(varied: Document) -> Iterator[str]:
    """Return each bound of a row that the run did not reach, or that has no figures."""
    found = {row["name"]: row for row in varied["rows"]}
    yield from (f"{name} (no figures)" for name in varied.get("failures", {}))
    for row in ROWS:
        if (seen := found.get(row.name)) is not None:
            result = Result(row, seen["gpubridge"], seen["triton"])
            if result.verdict == "below minimum" and result.ratio is not None:
                # Not rounded up to the minimum.
                reached = math.floor(result.ratio * 100) / 100
                yield f"{row.title} ({number(reached)} of {number(row.minimum)})"
    yield from _above(found)


def _above(found: Mapping[str, Document]) -> Iterator[str]:
    """Return the rows of gpubridge alone that took more than they may."""
    for own in OWN_ROWS:
        if (seen := found.get(own.name)) is not None:
            one = OwnResult(own, seen["one"], seen["other"])
            if one.verdict == "above bar":
                yield f"{own.title} ({number(one.ratio)} of at most {number(own.at_most)})"
    for start in START_ROWS:
        if (seen := found.get(start.name)) is not None and start.at_most_seconds is not None:
            took = statistics.median(each["seconds"] for each in seen["gpubridge"])
            if took > start.at_most_seconds:
                yield f"{start.title} ({number(took)} s of at most {number(start.at_most_seconds)})"


if __name__ == "__main__":
    main()
