"""Latency at given rates, side by side: ``python -m benchmarks.open_loop --peer DIR``; see README.md.

Each side is given shares of the rate that it reached itself in the same run. Requests come as a Poisson process, and
latency counts from the time that one was meant to be sent: a server that stands still is seen by every request
that would have come.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.client import NAME, Client
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.open_loop_table import SHARES, OpenResult, document, page
from benchmarks.peer import find_peer
from benchmarks.proc import cpu_seconds
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender, ServerProcess
from benchmarks.traffic import Traffic
from benchmarks.varied_bench import Bench, compare_answers, inferences, load, port_of, repository
from benchmarks.varied_rows import ROWS, LoadRow
from benchmarks.varied_table import Sample
from gpubridge.bench.arrivals import arrivals, check_client, latencies, lateness
from gpubridge.errors import BridgeError

_WORKS = {row.name: row for row in ROWS if row.name in ("add_sub_ids", "add_sub_grpc_ids")}
_WARM_UP_SECONDS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the wanted works; returns 0 if each row has its figures."""
    options = _parser().parse_args(arguments)
    names = options.works.split(",")
    if unknown := set(names) - set(_WORKS):
        raise SystemExit(f"no such work: {', '.join(sorted(unknown))}; see --help")
    peer, ours = find_peer(options.peer), Gpubridge()
    sides: list[Contender] = [ours] if peer is None else [ours, peer]
    with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as folder:
        rounds = 1 if options.quick else options.rounds
        seconds = 1 if options.quick else options.seconds
        bench = Bench(sides, Client(Path(folder)), rounds, seconds, Path(folder))
        about = {
            "started": started_now(),
            "commit": commit(),
            "machine": describe_machine(),
            "client": NAME,
            "python": {side.name: side.python for side in sides},
            "rounds": rounds,
            "seconds": seconds,
        }
        results = [result for name in names for result in _measure(_WORKS[name], bench)]
    text = page(about, results)
    print(text)
    if options.output:
        write_report(file_stem(options.output, "open_loop"), document(about, results), text)
    return int(any(result.failure for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.open_loop",
        description="Latency of gpubridge and of Triton at shares of the rate that each can serve.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument(
        "--works", metavar="NAMES", default=",".join(_WORKS), help="some of %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5, help="of each round")
    parser.add_argument("--quick", action="store_true", help="one round of a second: does it work")
    parser.add_argument("--output", metavar="DIR", help="write open_loop.md and .json there")
    return parser


def _measure(row: LoadRow, bench: Bench) -> list[OpenResult]:
    """Find each side's own rate, then load the sides in turn with shares of it."""
    print(f"{row.name} ...", file=sys.stderr, flush=True)
    traffic = row.traffic()
    with contextlib.ExitStack() as stack:
        try:
            servers = [
                stack.enter_context(bench.server(side, repository(row, traffic, bench)))
                for side in range(len(bench.sides))
            ]
            for server in servers:
                server.wait_ready()
                port = port_of(server, traffic)
                bench.client.run(traffic, port, row.connections, _WARM_UP_SECONDS)
            compare_answers(traffic, servers, ())
            most = [_own_rate(traffic, row, server, bench) for server in servers]
        except BridgeError as error:
            return [OpenResult(row.name, row.title, share, [], [], str(error)) for share in SHARES]
        return [_at_share(traffic, row, share, servers, most, bench) for share in SHARES]


def _own_rate(traffic: Traffic, row: LoadRow, server: ServerProcess, bench: Bench) -> float:
    """Return the requests/s that a server answers where each connection sends as soon as it can."""
    port = port_of(server, traffic)
    rounds = [load(traffic, row, server, port, bench) for _ in range(bench.rounds)]
    return statistics.median(each["rate"] for each in rounds)


def _at_share(
    traffic: Traffic,
    row: LoadRow,
    share: float,
    servers: Sequence[ServerProcess],
    most: Sequence[float],
    bench: Bench,
) -> OpenResult:
    samples: list[list[Sample]] = [[] for _ in servers]
    try:
        for turn in range(bench.rounds):
            for server, rate, taken in zip(servers, most, samples, strict=True):
                sample = _follow(traffic, row, server, (share * rate, turn), bench)
                taken.append({"most": rate, **sample})
    except BridgeError as error:
        return OpenResult(row.name, row.title, share, [], [], str(error))
    theirs = samples[1] if len(samples) > 1 else []
    return OpenResult(row.name, row.title, share, samples[0], theirs)


def _follow(
    traffic: Traffic, row: LoadRow, server: ServerProcess, load: tuple[float, int], bench: Bench
) -> Sample:
    """Send requests at a rate, at times of a seed; the round is repeated once where the client was late.

    Raises BridgeError if it was late again, or a request failed.
    """
    rate, seed = load
    schedule = arrivals(rate, bench.seconds, seed)
    for last in (False, True):
        sample = _followed(traffic, row, server, schedule, bench)
        try:
            check_client(sample)
        except BridgeError as error:
            if last:
                raise BridgeError(f"{server.name} at {rate:,.0f}/s: {error}") from error
        else:
            break
    return {"offered": rate, **sample}


def _followed(
    traffic: Traffic,
    row: LoadRow,
    server: ServerProcess,
    schedule: NDArray[np.int64],
    bench: Bench,
) -> Sample:
    """Send a request at each time of a schedule; the figures of the answers and of the client."""
    counted, spent = inferences(traffic, server), cpu_seconds(server.pid)
    followed = bench.client.follow(traffic, port_of(server, traffic), row.connections, schedule)
    spent = cpu_seconds(server.pid) - spent
    counted = inferences(traffic, server) - counted
    server.check_alive()
    if followed.failed or counted < len(schedule):
        raise BridgeError(
            f"{server.name}: {followed.failed} failed requests; {len(schedule)} answered, {counted} "
            "executed; a figure needs answers without failures"
        )
    took = int(followed.answered.max() - followed.meant.min()) / 1e9
    return {
        "rate": len(schedule) / took,
        "cpu_us": spent / len(schedule) * 1e6,
        "client_first": float(followed.first),
        **{f"{name}_us": value for name, value in latencies(followed).items()},
        **{f"late_{name}_us": value for name, value in lateness(followed).items()},
    }


if __name__ == "__main__":
    sys.exit(main())
