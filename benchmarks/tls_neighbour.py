"""Latency of a plain connection beside a load of large calls: plain or through TLS, of its server or another.

``python -m benchmarks.tls_neighbour [--rounds N] [--seconds N] [--output FILE]`` starts four servers, so that
what the processors' sharing costs, which is the same beside another server, can be told from waiting for TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.client import NAME, Client
from benchmarks.load import LoadFigures
from benchmarks.machine import commit, describe_machine, started_now
from benchmarks.serve import Gpubridge
from benchmarks.server_process import ServerProcess
from benchmarks.tls import tls_flags
from benchmarks.traffic import Traffic
from benchmarks.varied_models import MODELS, write_repository
from benchmarks.varied_rows import ROWS

_SMALL, _LARGE = "add_sub_http_1", "fp32_600k_grpc_4"
_SETTLE_SECONDS = 0.3


class _Case(NamedTuple):
    """A server that is asked by the plain connection, and one that is loaded beside, by its name."""

    words: str
    asked: str
    loaded: str | None = None
    tls: bool = False


_CASES = (
    _Case("alone", "plain"),
    _Case("600 KB over gRPC, the same server", "plain", "plain"),
    _Case("600 KB over gRPC, another server", "plain", "other plain"),
    _Case("600 KB over gRPC with TLS, the same server", "tls", "tls", tls=True),
    _Case("600 KB over gRPC with TLS, another server", "plain", "other tls", tls=True),
)


class _Bench:
    """Servers by their names, the clients, and the traffic of both."""

    def __init__(self, folder: Path, servers: dict[str, ServerProcess], seconds: int) -> None:
        self.servers = servers
        self.seconds = seconds
        self._small, self._large = traffic()
        self._client, self._loader = Client(folder), Client(folder / "loader")

    def measure(self, case: _Case) -> tuple[LoadFigures, LoadFigures | None]:
        """Ask for small responses for some seconds, under the case's load."""
        loads: list[LoadFigures] = []

        def load(server: ServerProcess) -> None:
            port, seconds = server.ports.grpc, self.seconds + 1
            loads.append(self._loader.run(self._large, port, 1, seconds, tls=case.tls))

        loader = None
        if case.loaded is not None:
            loader = threading.Thread(target=load, args=(self.servers[case.loaded],))
            loader.start()
            time.sleep(_SETTLE_SECONDS)
        seen = self._client.run(self._small, self.servers[case.asked].ports.http, 1, self.seconds)
        if loader is not None:
            loader.join()
        return seen, loads[0] if loads else None


def traffic() -> tuple[Traffic, Traffic]:
    """Return the small requests and the large ones, which are those of varied traffic."""
    rows = {row.name: row for row in ROWS}
    return rows[_SMALL].traffic(), rows[_LARGE].traffic()


@contextlib.contextmanager
def _servers(folder: Path) -> Iterator[dict[str, ServerProcess]]:
    names = sorted({name for each in traffic() for name in each.models})
    repository = write_repository([MODELS[name]() for name in names], folder / "models")
    flags = tls_flags(folder)
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ServerProcess(
                    Gpubridge(), repository, folder / f"{name}.log", flags if "tls" in name else []
                )
            )
            for name in ("plain", "other plain", "tls", "other tls")
        }
        for server in servers.values():
            server.wait_ready()
        yield servers


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases in turn, round by round, and print a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a file to write the page to")
    options = parser.parse_args(arguments)
    seen: dict[_Case, list[tuple[LoadFigures, LoadFigures | None]]] = {case: [] for case in _CASES}
    with tempfile.TemporaryDirectory(prefix="gpubridge-bench-") as name:
        folder = Path(name)
        (folder / "loader").mkdir()
        with _servers(folder) as servers:
            bench = _Bench(folder, servers, options.seconds)
            for _ in range(options.rounds):
                for case, figures in seen.items():
                    figures.append(bench.measure(case))
    page = _page(seen, options)
    sys.stdout.write(page)
    if options.output is not None:
        options.output.write_text(page)
    return 0


def _page(
    seen: dict[_Case, list[tuple[LoadFigures, LoadFigures | None]]], options: argparse.Namespace
) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    lines = [
        "# A plain connection beside large calls through TLS",
        "",
        "Written by `python -m benchmarks.tls_neighbour`, not by hand. One connection asks for `add_sub` over",
        "plain HTTP while another one sends 600 KB over gRPC and reads as much. Medians of the rounds; p99 also as",
        "fewest to most. Beside another server only the processors are shared.",
        "",
        f"- {machine}",
        f"- commit {commit()}, {started_now()}; {options.rounds} rounds of {options.seconds} s, in turn",
        f"- client: {NAME}, on the same machine",
        "",
        "| load | p50 µs | p99 µs | rounds | requests/s | large calls/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case, figures in seen.items():
        small = [each for each, _ in figures]
        worst = [each.p99_us for each in small]
        loads = [load.requests_per_second for _, load in figures if load is not None]
        lines.append(
            f"| {case.words} | {statistics.median(each.p50_us for each in small):,.0f} "
            f"| {statistics.median(worst):,.0f} | {min(worst):,.0f} to {max(worst):,.0f} "
            f"| {statistics.median(each.requests_per_second for each in small):,.0f} "
            f"| {f'{statistics.median(loads):,.0f}' if loads else '–'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
