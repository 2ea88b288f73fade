"""Measures rows: one server loaded at a time, the two sides in turn, round by round."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import H2Load, LoadGenerator, PerfAnalyzer
from benchmarks.payloads import PAYLOADS, Payload, check_answer
from benchmarks.proc import Usage, cpu_seconds, usage
from benchmarks.report import RowResult, Sample
from benchmarks.rows import Kind, Row
from benchmarks.server_process import Contender, ServerProcess
from benchmarks.slow_imports import write_models
from gpubridge.errors import BridgeError

_MODELS = Path(__file__).resolve().parent / "models"
_SERVED = _MODELS / "served"
_STARTUP = _MODELS / "startup"
_WARM_UP_SECONDS = 1
_SETTLE_SECONDS = 1.0
_IDLE_SECONDS = 3.0
# The soak mixes small, large and string requests; the last two have fewer connections.
_SOAK_MIX = (("add_sub", 16), ("fp32_600k", 4), ("bytes_10k", 4))


@dataclass(frozen=True, slots=True)
class Effort:
    """Effort of a run: rounds per row and seconds per round."""

    rounds: int
    seconds: int
    starts: int
    soak_passes: int


FULL = Effort(rounds=3, seconds=5, starts=5, soak_passes=4)
QUICK = Effort(rounds=2, seconds=1, starts=2, soak_passes=1)


@dataclass(frozen=True, slots=True)
class Bench:
    """The two sides, the load generators, the effort and a folder for server logs."""

    ours: Contender
    theirs: Contender | None
    generator: LoadGenerator
    analyzer: PerfAnalyzer | None
    h2load: H2Load | None
    effort: Effort
    logs: Path

    def sides(self) -> Sequence[Contender]:
        return [self.ours] if self.theirs is None else [self.ours, self.theirs]

    def load(self, row: Row) -> LoadGenerator:
        """Return the load generator for a row.

        Raises
        ------
        BridgeError
            If nothing here can.
        """
        if row.protocol == "http" and not row.shared_memory:
            return self.generator
        if row.light_client:
            if self.h2load is None:
                raise BridgeError(
                    "h2load is the load: expected it on PATH (nghttp2's client programs)"
                )
            return self.h2load
        if self.analyzer is None:
            raise BridgeError(
                "over gRPC and shared memory perf_analyzer is the load: expected it in --peer DIR"
            )
        return replace(self.analyzer, protocol=row.protocol, shared_memory=row.shared_memory)

    def server(self, side: int, repository: Path) -> ServerProcess:
        contender = self.sides()[side]
        return ServerProcess(contender, repository, self.logs / f"{side}-{contender.name}.log")


def measure(row: Row, bench: Bench) -> RowResult:
    """Measure one row; a failure becomes part of the result."""
    takers: Mapping[Kind, Callable[[Row, Bench], list[list[Sample]]]] = {
        Kind.LOAD: _load_rounds,
        Kind.START: _starts,
        Kind.IDLE: _idle_rounds,
        Kind.SOAK: _soak,
    }
    try:
        samples = takers[row.kind](row, bench)
    except BridgeError as error:
        return RowResult(row, failure=str(error))
    theirs = samples[1] if len(samples) > 1 else []
    return RowResult(row, ours=samples[0], theirs=theirs)


def stated_version(bench: Bench, side: int) -> str:
    """Start a side once and return the version that its server metadata states."""
    with bench.server(side, _STARTUP) as server:
        server.wait_ready()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/v2", timeout=10) as page:
            return str(json.load(page)["version"])


def _load_rounds(row: Row, bench: Bench) -> list[list[Sample]]:
    """Return per side the samples of its rounds, taken in turn with both servers running."""
    payload = PAYLOADS[row.payload]()
    samples: list[list[Sample]] = [[] for _ in bench.sides()]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(bench.server(side, _SERVED)) for side in range(len(samples))]
        for server in servers:
            server.wait_ready()
            check_answer(payload, server.http_port, server.name)
            port = server.ports.of(row.protocol)
            bench.load(row).run(payload, port, row.connections, _WARM_UP_SECONDS)
        for _ in range(bench.effort.rounds):
            for server, taken in zip(servers, samples, strict=True):
                taken.append(_load_once(payload, row, server, bench))
        for server in servers:
            check_answer(payload, server.http_port, server.name)
    return samples


def _load_once(payload: Payload, row: Row, server: ServerProcess, bench: Bench) -> Sample:
    """Load one server for a round, with the CPU time its processes spent per request."""
    before, batches = cpu_seconds(server.pid), _executions(payload, server)
    generator, port = bench.load(row), server.ports.of(row.protocol)
    figures = generator.run(payload, port, row.connections, bench.effort.seconds)
    spent = cpu_seconds(server.pid) - before
    inferences, executions = _executions(payload, server) - batches
    server.check_alive()
    # Generators may leave requests out of their counts: those of the warm-up, or under way at the end.
    failed = figures.failed or max(0, round(0.9 * figures.requests) - int(inferences))
    if failed or not figures.requests:
        raise BridgeError(
            f"{server.name}: {failed} failed and {figures.requests} answered requests to "
            f"{payload.path} on {row.connections} connections; a figure needs answers without failures"
        )
    return asdict(figures) | {
        "server_cpu_us": spent / figures.requests * 1e6,
        "mean_batch": float(inferences / executions),
        "responses_per_second": figures.requests_per_second * max(1, payload.responses),
    }


def _executions(payload: Payload, server: ServerProcess) -> NDArray[np.int64]:
    """Return how many inferences a model has made so far, and in how many executions."""
    address = f"http://127.0.0.1:{server.http_port}/v2/models/{payload.model}/stats"
    try:
        with urllib.request.urlopen(address, timeout=10) as page:
            figures = json.load(page)["model_stats"][0]
    except OSError as error:
        server.check_alive()
        raise BridgeError(f"{server.name}: no answer to GET {address}: {error}") from error
    return np.array([figures["inference_count"], figures["execution_count"]])


def _starts(row: Row, bench: Bench) -> list[list[Sample]]:
    """Return per side the times from start to ready; a first start of each is not counted.

    That first start fills the page cache and writes the models' bytecode.
    """
    repository = _STARTUP
    if row.slow_imports:
        repository = write_models(_STARTUP / "add_sub", bench.logs / "slow_imports")
    samples: list[list[Sample]] = [[] for _ in bench.sides()]
    for start in range(bench.effort.starts + 1):
        for side, taken in enumerate(samples):
            with bench.server(side, repository) as server:
                seconds = server.wait_ready()
            if start:
                taken.append({"seconds": seconds})
    return samples


def _idle_rounds(row: Row, bench: Bench) -> list[list[Sample]]:
    """Return per side the memory and CPU time of an idle server with one model, measured alone."""
    del row
    samples: list[list[Sample]] = [[] for _ in bench.sides()]
    for _ in range(bench.effort.rounds):
        for side, taken in enumerate(samples):
            with bench.server(side, _STARTUP) as server:
                server.wait_ready()
                time.sleep(_SETTLE_SECONDS)
                before = cpu_seconds(server.pid)
                time.sleep(_IDLE_SECONDS)
                spent = cpu_seconds(server.pid) - before
                held = asdict(usage(server.pid))
            taken.append(held | {"idle_cpu_percent": spent / _IDLE_SECONDS * 100})
    return samples


def _soak(row: Row, bench: Bench) -> list[list[Sample]]:
    """Return gpubridge's resources before and after a mix of requests; the peer is not soaked."""
    mix = [(PAYLOADS[name](), connections) for name, connections in _SOAK_MIX]
    requests = 0.0
    with bench.server(0, _SERVED) as server:
        server.wait_ready()
        for payload, connections in mix:
            check_answer(payload, server.http_port, server.name)
            bench.generator.run(payload, server.http_port, connections, _WARM_UP_SECONDS)
        before = _settled_usage(server)
        for _ in range(bench.effort.soak_passes):
            for payload, connections in mix:
                load = replace(row, connections=connections)
                requests += _load_once(payload, load, server, bench)["requests"]
        after = _settled_usage(server)
    sample: Sample = {"requests": requests, "pss_growth_mib": after.pss_mib - before.pss_mib}
    for moment, held in (("before", before), ("after", after)):
        sample |= {f"{name}_{moment}": value for name, value in asdict(held).items()}
    return [[sample]]


def _settled_usage(server: ServerProcess) -> Usage:
    time.sleep(_SETTLE_SECONDS)
    server.check_alive()
    return usage(server.pid)
