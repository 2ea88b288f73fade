"""One soak: traffic of every kind at a server of its own, a killer, and what is held afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.proc import tree
from benchmarks.serve import Gpubridge
from benchmarks.server_process import ServerProcess
from benchmarks.soak.grpc_traffic import cancel_calls, read_streams
from benchmarks.soak.holdings import Holdings, holdings
from benchmarks.soak.http_traffic import ask_for_sums, hang_up
from benchmarks.soak.ledger import Ledger, Outcome

__all__ = ["SoakReport", "soak"]

_MODELS = Path(__file__).resolve().parents[1] / "models" / "soak"
_WARM_UP_SECONDS = 3.0
# Arenas give segments back that were idle for half a minute.
_SETTLE_SECONDS = 75.0
_PSS_GROWTH_MIB = 24.0


@dataclass
class SoakReport:
    """What a soak saw.

    Attributes
    ----------
    kills : int
        How many stubs were killed.
    faults : list of str
        What must not be: an empty list is a passed soak.
    """

    ledger: Ledger
    seconds: float
    kills: int = 0
    before: Holdings | None = None
    after: Holdings | None = None
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the ledger, what was held, and the verdict."""
        lines = [
            f"{self.seconds:.0f} s, {self.ledger.sent:,} requests, {self.kills} stubs killed",
            self.ledger.table(),
            f"held before: {self.before}",
            f"held after:  {self.after}",
        ]
        lines += [f"FAULT {fault}" for fault in self.faults] or ["no fault"]
        return "\n".join(lines)


def soak(seconds: float, kill_every: float, log: Path) -> SoakReport:
    """Serve the soak's models and load them with everything for some seconds.

    Parameters
    ----------
    seconds : float
        How long requests are sent.
    kill_every : float
        Seconds between two kills of a stub.
    log : Path
        File for the server's output.
    """
    with ServerProcess(Gpubridge(), _MODELS, log) as server:
        server.wait_ready()
        _traffic(server, Ledger(), _WARM_UP_SECONDS, kill_every=_WARM_UP_SECONDS / 2)
        before = _settled(server, None)
        report = SoakReport(Ledger(), seconds, before=before)
        report.kills = _traffic(server, report.ledger, seconds, kill_every)
        report.after = _settled(server, before)
        report.faults = [
            *report.ledger.faults(),
            *report.after.excess(before, _PSS_GROWTH_MIB),
            *_open_requests(server),
        ]
        if not report.ledger.count(Outcome.ANSWERED):
            report.faults.append("no request was answered")
        server.check_alive()
    return report


def _traffic(server: ServerProcess, ledger: Ledger, seconds: float, kill_every: float) -> int:
    """Send requests of every kind, and kill stubs; returns how many were killed."""
    stopped = threading.Event()

    def running() -> bool:
        return not stopped.is_set()

    http, grpc = server.ports.http, server.ports.grpc
    clients: list[Callable[[], None]] = [
        lambda: ask_for_sums(ledger, "default", "add", False, http, running),
        lambda: ask_for_sums(ledger, "default", "add", False, http, running),
        lambda: ask_for_sums(ledger, "BLS", "caller", False, http, running),
        lambda: ask_for_sums(ledger, "ensemble", "chain", True, http, running),
        lambda: read_streams(ledger, "decoupled", "count", grpc, running),
        lambda: read_streams(ledger, "decoupled ensemble", "stream_chain", grpc, running),
        lambda: cancel_calls(ledger, "cancelled call", grpc, running),
        lambda: hang_up(ledger, "hang-up", http, running),
    ]
    threads = [threading.Thread(target=_watched, args=(run, ledger)) for run in clients]
    for thread in threads:
        thread.start()
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(kill_every, max(0.0, end - time.monotonic())))
        if time.monotonic() < end:
            kills += _kill_a_stub(server.pid)
    stopped.set()
    for thread in threads:
        thread.join()
    return kills


def _watched(run: Callable[[], None], ledger: Ledger) -> None:
    try:
        run()
    except Exception as error:  # noqa: BLE001  (a client that broke is a finding)
        ledger.fault(f"a client broke: {type(error).__name__}: {error}")


def _kill_a_stub(server: int) -> int:
    stubs = [pid for pid in tree(server) if pid != server]
    if not stubs:
        return 0
    try:
        os.kill(random.choice(stubs), signal.SIGKILL)  # noqa: S311
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
            if not held.excess(before, _PSS_GROWTH_MIB):
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
