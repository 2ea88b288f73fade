"""gpubridge beside other servers of Python models: ``python -m benchmarks.peers --environments DIR``; see README.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import NAME, Client
from benchmarks.environments import make_environment
from benchmarks.machine import commit, describe_machine, file_stem, started_now, write_report
from benchmarks.peer import find_peer
from benchmarks.peers.servers import PEERS, PeerServer, Place, contender, versions_of
from benchmarks.peers.table import PeerResult, document, page
from benchmarks.peers.works import WORKS, NotReadyError, Work
from benchmarks.proc import cpu_seconds, usage
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Ports, free_ports
from benchmarks.varied_table import Sample
from gpubridge.bench.server_process import ServerProcess
from gpubridge.errors import BridgeError

_WARM_UP_SECONDS = 1
_START_SECONDS = 120.0
_POLL_SECONDS = 0.005
# Numbers of the checks; those of the load are far larger.
_CHECKED_AFTER = (11, 12, 13)


@dataclass(frozen=True, slots=True)
class Effort:
    """The client, rounds and seconds of each, and a folder for what servers write."""

    client: Client
    rounds: int
    seconds: int
    folder: Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the wanted works on the wanted servers; returns 0 if each has its figures."""
    options = _parser().parse_args(arguments)
    servers, absent = _servers(options)
    works = [work for work in WORKS if work.name in options.works.split(",")]
    with tempfile.TemporaryDirectory(prefix="gpubridge-peers-") as folder:
        rounds = 1 if options.quick else options.rounds
        seconds = 1 if options.quick else options.seconds
        effort = Effort(Client(Path(folder)), rounds, seconds, Path(folder))
        about = {
            "started": started_now(),
            "commit": commit(),
            "machine": describe_machine(),
            "client": NAME,
            "installed": {server.name: versions_of(server) for server, _ in servers},
            "absent": absent,
            "rounds": rounds,
            "seconds": seconds,
        }
        results = [result for work in works for result in _measure(work, servers, effort)]
    text = page(about, results)
    print(text)
    if options.output:
        write_report(file_stem(options.output, "peers"), document(about, results), text)
    return int(bool(absent) or any(result.failure for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="gpubridge, Triton and other servers of Python models with the same works.",
    )
    parser.add_argument("--peer", metavar="DIR", help="Triton's directory, else $GPUBRIDGE_PEER")
    parser.add_argument(
        "--environments",
        metavar="DIR",
        required=True,
        help="where each other server has its virtual environment; they are kept",
    )
    parser.add_argument(
        "--servers",
        metavar="NAMES",
        default=",".join(server.name for server in PEERS),
        help="some of %(default)s; gpubridge and Triton are always there",
    )
    parser.add_argument(
        "--works",
        metavar="NAMES",
        default=",".join(work.name for work in WORKS),
        help="some of %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=5, help="of each round")
    parser.add_argument("--quick", action="store_true", help="one round of a second: does it work")
    parser.add_argument("--output", metavar="DIR", help="write peers.md and .json there")
    return parser


def _servers(
    options: argparse.Namespace,
) -> tuple[list[tuple[PeerServer, Path]], dict[str, str]]:
    """Return the servers, each with its interpreter, and the reasons of those that cannot be had."""
    servers = [(contender(Gpubridge()), Path(sys.executable))]
    absent = {}
    triton = find_peer(options.peer)
    if triton is None:
        absent["Triton"] = "no --peer DIR was given"
    else:
        servers.append((contender(triton), triton.directory / "venv" / "bin" / "python"))
    for server in PEERS:
        if server.name not in options.servers.split(",") or server.install is None:
            continue
        print(f"{server.name}: {versions_of(server)} ...", file=sys.stderr, flush=True)
        folder = Path(options.environments).resolve() / server.name.lower().replace(" ", "-")
        try:
            python = make_environment(folder, sys.executable, server.install.packages())
        except BridgeError as error:
            absent[server.name] = str(error)
        else:
            servers.append((server, python))
    return servers, absent


def _measure(
    work: Work, servers: Sequence[tuple[PeerServer, Path]], effort: Effort
) -> list[PeerResult]:
    """Start, check and load the servers in turn, round by round; each runs alone."""
    samples: dict[str, list[Sample]] = {server.name: [] for server, _ in servers}
    failures: dict[str, str] = {}
    for _ in range(effort.rounds):
        for server, python in servers:
            if server.name in failures:
                continue
            print(f"{work.name}: {server.name} ...", file=sys.stderr, flush=True)
            try:
                samples[server.name].append(_round(work, server, python, effort))
            except (BridgeError, OSError) as error:
                failures[server.name] = str(error)
    return [
        PeerResult(
            work.name,
            server.name,
            [] if server.name in failures else samples[server.name],
            failures.get(server.name, ""),
        )
        for server, _ in servers
    ]


def _round(work: Work, server: PeerServer, python: Path, effort: Effort) -> Sample:
    ports = Ports(*free_ports(3))
    folder = effort.folder / "server"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    launch = server.launch(Place(work.name, ports, python, folder))
    log = effort.folder / "server.log"
    traffic = work.traffic(server.dialect)
    with ServerProcess(
        server.name, launch.command, log, launch.environment, launch.directory
    ) as process:
        started = _first_answer(work, server, ports.http, process)
        effort.client.run(traffic, ports.http, work.connections, _WARM_UP_SECONDS)
        spent = cpu_seconds(process.pid)
        figures = effort.client.run(traffic, ports.http, work.connections, effort.seconds)
        spent = cpu_seconds(process.pid) - spent
        process.check_alive()
        held = usage(process.pid)
        if figures.failed:
            raise BridgeError(f"{figures.failed} of {figures.requests} requests failed")
        for turn in _CHECKED_AFTER:
            work.check(server.dialect, ports.http, turn)
    count = figures.requests * work.responses
    return {
        "rate": figures.requests_per_second * work.responses,
        "cpu_us": spent / count * 1e6,
        "p50_us": figures.p50_us,
        "p99_us": figures.p99_us,
        "pss_mib": held.pss_mib,
        "processes": held.processes,
        "start_seconds": started,
    }


def _first_answer(work: Work, server: PeerServer, port: int, process: ServerProcess) -> float:
    """Return the seconds from the start to the first right answer.

    Raises BridgeError if the server ends before, answers wrongly, or takes too long.
    """
    begun = time.monotonic()
    while True:
        process.check_start(_START_SECONDS)
        try:
            work.check(server.dialect, port, 1)
        except NotReadyError:
            time.sleep(_POLL_SECONDS)
        else:
            return time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main())
