"""Varied traffic, side by side: ``python -m benchmarks.varied --peer DIR``; see README.md.

No two requests of a row have the same bytes, unless its title says so. What counts is the CPU time that a
server and its stubs spend on a request; rates stand beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.client import NAME, Client
from benchmarks.environments import make_environment
from benchmarks.figures import draw
from benchmarks.haproxy import proxied
from benchmarks.load import LoadFigures
from benchmarks.machine import commit, describe_machine, started_now
from benchmarks.peer import Peer, find_peer
from benchmarks.proc import cpu_seconds, usage
from benchmarks.serve import Gpubridge
from benchmarks.server_process import Contender, ServerProcess
from benchmarks.shared_regions import check_output, clear_outputs, register, shared_regions
from benchmarks.tls import tls_flags
from benchmarks.traffic import Traffic
from benchmarks.varied_models import MODELS, Model, copies, write_repository
from benchmarks.varied_rows import NAMES, OWN_ROWS, ROWS, START_ROWS, LoadRow, OwnRow, StartRow
from benchmarks.varied_table import OwnResult, Result, Sample, StartResult, document, failures, page
from gpubridge.errors import BridgeError

_WARM_UP_SECONDS = 1
_SETTLE_SECONDS = 1.0
_REGION_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Bench:
    """Needs of a row: the sides (gpubridge first), the client, the effort, a folder."""

    sides: Sequence[Contender]
    client: Client
    rounds: int
    seconds: int
    folder: Path
    environment_python: str = sys.executable

    def environment(self, models: Sequence[Model]) -> Path | None:
        """Return the Python environment that some of the models need; None if none does."""
        if not any(model.own_environment for model in models):
            return None
        packages = [f"numpy=={np.__version__}"]
        if self.environment_python != sys.executable:
            packages = ["numpy"]
        environment = self.folder / "environment"
        make_environment(environment, self.environment_python, packages)
        return environment

    def server(self, side: int, repository: Path, *given: str, tls: bool = False) -> ServerProcess:
        """Return a side's server, whose gRPC may have TLS; it is not yet started."""
        flags = [*given, *(tls_flags(self.folder) if tls else [])]
        return ServerProcess(self.sides[side], repository, self.folder / f"{side}.log", flags)


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
                    bench.server(side, _repository(row, traffic, bench), *row.flags, tls=row.tls)
                )
                for side in range(len(samples))
            ]
            regions: tuple[str, ...] = ()
            if traffic.regions:
                regions = stack.enter_context(shared_regions(row.connections, _REGION_BYTES))
            for server in servers:
                server.wait_ready()
                register(regions, server.http_port)
                port = _port(server, traffic)
                bench.client.run(traffic, port, row.connections, _WARM_UP_SECONDS, tls=row.tls)
            _compare_answers(traffic, servers, regions)
            for _ in range(bench.rounds):
                for server, taken in zip(servers, samples, strict=True):
                    port = _port(server, traffic)
                    taken.append(_load(traffic, row, server, port, bench))
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
            server = stack.enter_context(bench.server(0, repository))
            server.wait_ready()
            ports = [_port(server, traffic) for _, traffic in works]
            if row.proxied is not None:
                proxy = proxied(server.ports.grpc, bench.folder, row.proxied)
                ports[0] = stack.enter_context(proxy)
            for warm in (True, *[False] * bench.rounds):
                for (work, traffic), port, taken in zip(works, ports, samples, strict=True):
                    seconds = _WARM_UP_SECONDS if warm else bench.seconds
                    effort = replace(bench, seconds=seconds)
                    sample = _load(traffic, work, server, port, effort)
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


def _repository(row: LoadRow, traffic: Traffic, bench: Bench) -> Path:
    models = [MODELS[name]() for name in (*traffic.models, *row.models)]
    return write_repository(models, bench.folder / row.name)


def _port(server: ServerProcess, traffic: Traffic) -> int:
    return server.ports.of(traffic.protocol)


def _load(traffic: Traffic, row: LoadRow, server: ServerProcess, port: int, bench: Bench) -> Sample:
    """Load a server for a round; its figures, with the CPU time spent on a request."""
    counted, spent = _inferences(traffic, server), cpu_seconds(server.pid)
    figures: LoadFigures = bench.client.run(
        traffic, port, row.connections, bench.seconds, tls=row.tls
    )
    spent = cpu_seconds(server.pid) - spent
    counted = _inferences(traffic, server) - counted
    server.check_alive()
    if figures.failed or counted < figures.requests:
        raise BridgeError(
            f"{server.name}: {figures.failed} failed requests; {figures.requests} answered, "
            f"{counted} executed; a figure needs answers without failures"
        )
    return {
        "rate": figures.requests_per_second * traffic.responses,
        "cpu_us": spent / (figures.requests * traffic.responses) * 1e6,
        "p50_us": figures.p50_us,
        "p99_us": figures.p99_us,
        "mean_us": figures.mean_us,
    }


def _inferences(traffic: Traffic, server: ServerProcess) -> int:
    count = 0
    for model in set(traffic.models):
        address = f"http://127.0.0.1:{server.http_port}/v2/models/{model}/stats"
        with urllib.request.urlopen(address, timeout=60) as answer:
            entry = json.load(answer)["model_stats"][0]
            count += entry["inference_count"] + entry["inference_stats"]["cache_hit"]["count"]
    return count


def _compare_answers(
    traffic: Traffic, servers: Sequence[ServerProcess], regions: tuple[str, ...]
) -> None:
    """Ask each server the first request; they must answer alike, and as long as it is HTTP, with 200."""
    if traffic.path or traffic.in_order:
        return
    answers = []
    for server in servers:
        clear_outputs(regions)
        answers.append(_outputs(traffic.requests[0].filled(), server))
        if regions:
            check_output(regions, server.name)
    if any(answer != answers[0] for answer in answers):
        raise BridgeError(f"answers differ: {[str(answer)[:200] for answer in answers]}")


def _outputs(request: bytes, server: ServerProcess) -> object:
    """Return the outputs of an answer, by name, or its events."""
    head, _, body = request.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:])
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request("POST", lines[0].split()[1], body, headers)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise BridgeError(f"{server.name}: status {answer.status}: {data[:300]!r}")
    if answer.headers.get_content_type() == "text/event-stream":
        return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: ")]
    length = int(answer.headers.get("Inference-Header-Content-Length", len(data)))
    described = json.loads(data[:length])
    outputs: dict[str, object] = {}
    # Triton answers with the outputs in any order.
    for output in described.get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size", 0)
        if output["datatype"] == "FP32":
            # Decimals that are the same float are the same value.
            output["data"] = np.float32(output.get("data", [])).tolist()
        outputs[output["name"]] = (output, data[length : length + size])
        length += size
    return outputs or described


if __name__ == "__main__":
    sys.exit(main())
