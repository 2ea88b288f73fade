"""Varied traffic, side by side: ``python -m benchmarks.varied --peer DIR``; see README.md.

No two requests of a row have the same bytes, unless its title says so. What counts is the CPU time that a
server and its stubs spend on a request; rates stand beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.client import NAME, Client
from benchmarks.figures import draw
from benchmarks.haproxy import proxied
from benchmarks.machine import commit, describe_machine, started_now
from benchmarks.peer import Peer, find_peer
from benchmarks.proc import usage
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender
from benchmarks.shared_regions import register, shared_regions
from benchmarks.varied_bench import Bench, compare_answers, load, port_of, repository
from benchmarks.varied_models import MODELS, copies, write_repository
from benchmarks.varied_rows import NAMES, OWN_ROWS, ROWS, START_ROWS, LoadRow, OwnRow, StartRow
from benchmarks.varied_table import OwnResult, Result, Sample, StartResult, document, failures, page
from gpubridge.errors import BridgeError

_WARM_UP_SECONDS = 1
_SETTLE_SECONDS = 1.0
_REGION_BYTES = 1 << 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the wanted rows; returns 0 if each has its figures."""
    options = _parser().parse_args(arguments)
    peer: Peer | None = find_peer(options.peer)
    ours: Contender = Gpubridge()
    with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder:
        bench = Bench(
            [ours] if peer is None else [ours, peer],
            Client(Path(folder)),
            1 if options.quick else options.rounds,
            1 if options.quick else options.seconds,
            Path(folder),
            options.environment_python,
        )
        results, own, starts = _run(bench, options.rows.split(",") if options.rows else None)
    about = {
        "started": started_now(),
        "commit": commit(),
        "machine": describe_machine(),
        "client": NAME,
        "python": {side.name: side.python for side in bench.sides},
        "rounds": bench.rounds,
        "seconds": bench.seconds,
    }
    text = page(about, results, own, starts)
    print(text)
    if options.output:
        folder_ = Path(options.output)
        folder_.mkdir(parents=True, exist_ok=True)
        (folder_ / "varied.md").write_text(text, encoding="utf-8")
        recorded = document(about, results, own, starts)
        (folder_ / "varied.json").write_text(recorded)
        draw(json.loads(recorded), folder_ / "varied.png")
    return int(bool(failures(results, own, starts)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.varied",
        description="Varied requests to gpubridge, and to Triton beside it: CPU time and rates.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument("--rows", metavar="NAMES", help=f"some of {','.join(NAMES)}")
    parser.add_argument(
        "--environment-python",
        metavar="PROGRAM",
        default=sys.executable,
        help="the Python of a model's own environment; default: a virtual environment of this one",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each round")
    parser.add_argument("--quick", action="store_true", help="one round of a second: does it work")
    parser.add_argument("--output", metavar="DIR", help="write varied.md, .json and .png there")
    return parser


def _run(
    bench: Bench, names: Sequence[str] | None
) -> tuple[list[Result], list[OwnResult], list[StartResult]]:
    if names is not None and (unknown := set(names).difference(NAMES)):
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; see --help")

    def wanted(row: LoadRow | OwnRow | StartRow) -> bool:
        if names is not None and row.name not in names:
            return False
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        return True

    return (
        [_measure(row, bench) for row in ROWS if wanted(row)],
        [_measure_own(row, bench) for row in OWN_ROWS if wanted(row)],
        [_measure_start(row, bench) for row in START_ROWS if wanted(row)],
    )


def _measure(row: LoadRow, bench: Bench) -> Result:
    """Load both sides in turn, round by round."""
    traffic = row.traffic()
    samples: list[list[Sample]] = [[] for _ in bench.sides]
    try:
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(
                    bench.server(side, repository(row, traffic, bench), *row.flags, tls=row.tls)
                )
                for side in range(len(samples))
            ]
            regions: tuple[str, ...] = ()
            if traffic.regions:
                regions = stack.enter_context(shared_regions(row.connections, _REGION_BYTES))
            for server in servers:
                server.wait_ready()
                register(regions, server.http_port)
                port = port_of(server, traffic)
                bench.client.run(traffic, port, row.connections, _WARM_UP_SECONDS, tls=row.tls)
            compare_answers(traffic, servers, regions)
            for _ in range(bench.rounds):
                for server, taken in zip(servers, samples, strict=True):
                    port = port_of(server, traffic)
                    taken.append(load(traffic, row, server, port, bench))
    except BridgeError as error:
        return Result(row, [], [], str(error))
    return Result(row, samples[0], samples[1] if len(samples) > 1 else [])


def _measure_own(row: OwnRow, bench: Bench) -> OwnResult:
    """Load gpubridge with two works in turn, round by round."""
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    works = [(each, each.traffic()) for each in (row.one, row.other)]
    names = {name for work, traffic in works for name in (*traffic.models, *work.models)}
    models = [MODELS[name]() for name in sorted(names)]
    try:
        environment = bench.environment(models)
        repository = write_repository(models, bench.folder / "own", environment)
        with contextlib.ExitStack() as stack:
            servers = [
                stack.enter_context(bench.server(0, repository, *flags))
                for flags in dict.fromkeys(work.flags for work, _ in works)
            ]
            for server in servers:
                server.wait_ready()
            # Of one server, or of one with each work's flags.
            asked = [servers[0], servers[-1]]
            ports = [
                port_of(server, traffic) for server, (_, traffic) in zip(asked, works, strict=True)
            ]
            if row.proxied is not None:
                proxy = proxied(server.ports.grpc, bench.folder, row.proxied)
                ports[0] = stack.enter_context(proxy)
            for warm in (True, *[False] * bench.rounds):
                for (work, traffic), server, port, taken in zip(
                    works, asked, ports, samples, strict=True
                ):
                    seconds = _WARM_UP_SECONDS if warm else bench.seconds
                    effort = replace(bench, seconds=seconds)
                    sample = load(traffic, work, server, port, effort)
                    if not warm:
                        taken.append(sample)
    except BridgeError as error:
        return OwnResult(row, [], [], str(error))
    return OwnResult(row, *samples)


def _measure_start(row: StartRow, bench: Bench) -> StartResult:
    """Start each side with a number of models, in turn; a first start of each is not counted."""
    repository = write_repository(copies(row.models), bench.folder / "starts")
    samples: list[list[Sample]] = [[] for _ in bench.sides]
    try:
        for start in range(bench.rounds + 1):
            for side, taken in enumerate(samples):
                with bench.server(side, repository) as server:
                    seconds = server.wait_ready()
                    time.sleep(_SETTLE_SECONDS)
                    held = usage(server.pid)
                if start:
                    taken.append({"seconds": seconds, "pss_mib": held.pss_mib})
    except BridgeError as error:
        return StartResult(row, [], [], str(error))
    return StartResult(row, samples[0], samples[1] if len(samples) > 1 else [])


if __name__ == "__main__":
    sys.exit(main())
