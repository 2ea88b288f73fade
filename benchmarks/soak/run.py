"""One soak: mixed traffic to a server whose stubs are killed, and the resources held afterwards."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.proc import started
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Ports, ServerProcess
from benchmarks.soak.grpc_traffic import ask_over_grpc, cancel_calls, read_streams
from benchmarks.soak.holdings import Holdings, holdings
from benchmarks.soak.http_traffic import ask_over_http, hang_up
from benchmarks.soak.known_requests import RequestSource, Sequences, Sums, Texts
from benchmarks.soak.request_log import Outcome, RequestLog
from gpubridge.bench.processes import process_tree

__all__ = ["Aim", "SoakReport", "soak"]

_MODELS = Path(__file__).resolve().parents[1] / "models" / "soak"
_SHORTEST_WARM_UP, _LONGEST_WARM_UP = 3.0, 20.0
_WARM_UP_SHARE = 1 / 30
# Arenas give segments back that were idle for half a minute.
_SETTLE_SECONDS = 75.0
_PSS_GROWTH_MIB = 24.0


@dataclass
class SoakReport:
    """Results of a soak.

    Attributes
    ----------
    seconds : float
        How long requests were sent.
    kills : int
        Number of killed stubs.
    faults : list of str
        Violations; empty for a passed soak.
    """

    log: RequestLog
    seconds: float = 0.0
    kills: int = 0
    before: Holdings | None = None
    after: Holdings | None = None
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the log, what was held, and the verdict."""
        answered = self.log.count(Outcome.ANSWERED)
        lines = [
            (
                f"{self.seconds:.0f} s, {self.log.sent:,} requests, {answered:,} of them answered, "
                f"{self.kills:,} stubs killed"
            ),
            self.log.table(),
            f"held before: {self.before}",
            f"held after:  {self.after}",
        ]
        lines += [f"FAULT {fault}" for fault in self.faults] or ["no fault"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Aim:
    """End of a soak: with so many requests answered and stubs killed, or after ``seconds``.

    Without numbers it lasts ``seconds``; with them it has failed by then.
    """

    seconds: float
    answered: int = 0
    kills: int = 0

    def reached(self, log: RequestLog, kills: int) -> bool:
        """Return whether the wanted numbers are reached, if there are any."""
        answered = log.count(Outcome.ANSWERED)
        return bool(self.answered or self.kills) and (
            answered >= self.answered and kills >= self.kills
        )

    def missed(self, report: SoakReport) -> list[str]:
        """Return the numbers that were not reached."""
        numbers = {
            "answered": (report.log.count(Outcome.ANSWERED), max(self.answered, 1)),
            "stubs killed": (report.kills, self.kills),
        }
        return [
            f"{name}: {found:,}, expected {wanted:,}"
            for name, (found, wanted) in numbers.items()
            if found < wanted
        ]


def soak(aim: Aim, kill_every: float, log: Path) -> SoakReport:
    """Serve the soak's models and load them with mixed traffic until the aim is reached.

    Raises BridgeError with the server's last output if its process ends.

    Parameters
    ----------
    kill_every : float
        Seconds between two kills of a stub.
    log : Path
        File for the server's output.
    """
    # A forked stub shares memory, the one that takes its place does not.
    with ServerProcess(Gpubridge(), _MODELS, log, ["--fork-stubs=false"]) as server:
        server.wait_ready()
        # The memory of stubs grows at first, with the sizes of requests.
        seconds = min(max(aim.seconds * _WARM_UP_SHARE, _SHORTEST_WARM_UP), _LONGEST_WARM_UP)
        _traffic(server, SoakReport(RequestLog()), Aim(seconds), seconds / 2)
        before = _settled(server, None)
        report = SoakReport(RequestLog(), before=before)
        _traffic(server, report, aim, kill_every)
        report.after = _settled(server, before)
        report.faults = [
            *report.log.faults(),
            *aim.missed(report),
            *report.after.excess(before, _PSS_GROWTH_MIB),
            *_open_requests(server),
        ]
        if report.after.processes < before.processes:
            report.faults.append(
                f"{before.processes - report.after.processes} stubs did not come back"
            )
        if report.log.lost_sequences > report.kills:
            report.faults.append(f"{report.log.lost_sequences} sequences were lost")
        server.check_alive()
    report.faults += [line for line in log.read_text().splitlines() if line.startswith("Traceback")]
    return report


def _traffic(server: ServerProcess, report: SoakReport, aim: Aim, kill_every: float) -> None:
    """Send requests of every kind, and kill stubs, until the aim is reached or the time is up."""
    stopped = threading.Event()

    def running() -> bool:
        return not stopped.is_set()

    log = report.log
    threads = [
        threading.Thread(target=_watched, args=(run, log))
        for run in _clients(log, server.ports, running)
    ]
    for thread in threads:
        thread.start()
    begun = last = time.monotonic()
    try:
        while time.monotonic() < begun + aim.seconds and not aim.reached(log, report.kills):
            time.sleep(max(0.0, min(last + kill_every, begun + aim.seconds) - time.monotonic()))
            last = time.monotonic()
            server.check_alive()
            if last < begun + aim.seconds and (not aim.kills or report.kills < aim.kills):
                report.kills += _kill_a_stub(server.pid)
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    report.seconds = time.monotonic() - begun


def _clients(
    log: RequestLog, ports: Ports, running: Callable[[], bool]
) -> list[Callable[[], None]]:
    """Return clients of all kinds, each for one thread."""
    http: list[tuple[str, str, RequestSource]] = [
        ("default", "add", Sums("default")),
        ("BLS", "caller", Sums("BLS")),
        ("ensemble", "chain", Sums("ensemble", twice=True)),
        ("strings", "text", Texts("strings")),
        ("sequence", "running", Sequences("sequence")),
    ]
    grpc: list[tuple[str, str, RequestSource]] = [
        ("default, gRPC", "add", Sums("default, gRPC")),
        ("BLS, gRPC", "caller", Sums("BLS, gRPC")),
        ("ensemble, gRPC", "chain", Sums("ensemble, gRPC", twice=True)),
        ("strings, gRPC", "text", Texts("strings, gRPC")),
        ("sequence, gRPC", "running", Sequences("sequence, gRPC")),
    ]
    return [
        *(partial(ask_over_http, log, *each, ports.http, running) for each in http),
        *(partial(ask_over_grpc, log, *each, ports.grpc, running) for each in grpc),
        partial(read_streams, log, "decoupled", "count", ports.grpc, running),
        partial(read_streams, log, "decoupled ensemble", "stream_chain", ports.grpc, running),
        partial(cancel_calls, log, "cancelled call", ports.grpc, running),
        partial(hang_up, log, "hang-up", ports.http, running),
    ]


def _watched(run: Callable[[], None], log: RequestLog) -> None:
    try:
        run()
    except Exception as error:  # noqa: BLE001  (a client that broke is a finding)
        log.fault(f"a client broke: {type(error).__name__}: {error}")


def _kill_a_stub(server: int) -> int:
    """Kill the stub that has run longest: a stub that dies young is started again later and later."""
    stubs = [pid for pid in process_tree(server) if pid != server]
    if not stubs:
        return 0
    try:
        os.kill(min(stubs, key=started), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1


def _settled(server: ServerProcess, before: Holdings | None) -> Holdings:
    """Wait until the server holds no more than before, or is quiet, or the time is up."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    held = holdings(server.pid)
    while time.monotonic() < deadline:
        time.sleep(1.0)
        last, held = held, holdings(server.pid)
        if before is not None:
            back = held.processes >= before.processes
            if back and not held.excess(before, _PSS_GROWTH_MIB):
                break
        elif held.segments == last.segments and held.processes == last.processes:
            break
    return held


def _open_requests(server: ServerProcess) -> list[str]:
    """Say which models still have requests by the metrics page, or are not ready."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    names = ("nv_inference_pending_request_count", "gpubridge_queued_requests")
    found = [line for line in lines if line.startswith(names) and not line.endswith((" 0", " 0.0"))]
    index = f"http://127.0.0.1:{server.http_port}/v2/repository/index"
    with urllib.request.urlopen(urllib.request.Request(index, method="POST")) as answer:
        rows = json.load(answer)
    return found + [f"{row['name']} is {row['state']}" for row in rows if row["state"] != "READY"]
