"""Command line: ``python -m benchmarks --peer DIR``; see README.md."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from benchmarks.figures import draw
from benchmarks.load import choose_analyzer, choose_generator, choose_h2load
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.measure import FULL, QUICK, Bench, measure, stated_version
from benchmarks.peer import find_peer
from benchmarks.report import Report, Verdict
from benchmarks.rows import ROWS, Row, select
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender
from benchmarks.tables import console_table, markdown_page
from gpubridge import __version__
from gpubridge.errors import BridgeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the wanted rows; return 0 if every one has its figures."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        rows = select(options.rows)
        if options.null_test:
            # The bars are those of gpubridge; noise has none to reach.
            rows = tuple(replace(row, minimum=None, aim=None) for row in rows)
        with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as logs:
            bench = _bench(options, Path(logs))
            report = _run(rows, bench, options)
    except (BridgeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    _write(report, file_stem(options.output, _title(options)))
    return 1 if any(result.verdict is Verdict.FAILED for result in report.results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gpubridge, and Triton beside it, on this machine.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument("--output", metavar="DIR", default="benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="short rounds: a smoke test")
    parser.add_argument(
        "--rows", metavar="NAMES", help=f"some of {','.join(row.name for row in ROWS)}"
    )
    parser.add_argument("--load", choices=("auto", "wrk", "perf_analyzer", "plain"), default="auto")
    parser.add_argument(
        "--null-test",
        action="store_true",
        help="measure Triton against itself: what the machine's noise alone gives",
    )
    return parser


def _bench(options: argparse.Namespace, logs: Path) -> Bench:
    peer = find_peer(options.peer)
    ours: Contender = Gpubridge()
    if options.null_test:
        if peer is None:
            raise BridgeError("--null-test measures Triton twice: expected --peer DIR, got none")
        ours = replace(peer, name="Triton again")
    generator = choose_generator(peer, options.load)
    effort = QUICK if options.quick else FULL
    return Bench(ours, peer, generator, choose_analyzer(peer), choose_h2load(), effort, logs)


def _run(rows: Sequence[Row], bench: Bench, options: argparse.Namespace) -> Report:
    machine = describe_machine()
    started = started_now()
    if bench.theirs is None:
        print("no peer given: gpubridge's figures alone (see --help)", file=sys.stderr)
    versions = {"gpubridge": "(null test: Triton again)" if options.null_test else __version__}
    versions["gpubridge's Python"] = bench.ours.python
    if bench.theirs is not None:
        versions["Triton"] = stated_version(bench, side=1)
        versions["Triton's Python"] = bench.theirs.python
    results = []
    for row in rows:
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        results.append(measure(row, bench))
    settings = asdict(bench.effort) | {
        "compared": bench.theirs is not None,
        "load_generator": bench.generator.name,
    }
    return Report(started, commit(), machine, versions, settings, results)


def _write(report: Report, stem: Path) -> None:
    drawn = draw(report.as_document(), stem.with_suffix(".png"))
    page = markdown_page(report, f"{stem.name}.png" if drawn else None)
    write_report(stem, report.as_document(), page)
    print(console_table(report))
    print(f"written: {stem}.json, .md" + (", .png" if drawn else ""))


def _title(options: argparse.Namespace) -> str:
    """Name the files by what was run, so that a trial does not overwrite the full comparison."""
    words = ["side_by_side"]
    words += [word for word in ("null_test", "quick") if getattr(options, word)]
    return "_".join(words + (["some_rows"] if options.rows else []))


def _stop(number: int, frame: FrameType | None) -> None:
    """Turn SIGTERM into an exit that closes the servers on its way."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
