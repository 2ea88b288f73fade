"""Servers of varied traffic: how both sides are started, that they answer alike, what they have counted."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.client import Client
from benchmarks.environments import make_environment
from benchmarks.load import LoadFigures
from benchmarks.proc import cpu_seconds
from benchmarks.server_process import Contender, ServerProcess
from benchmarks.shared_regions import check_output, clear_outputs
from benchmarks.tls import tls_flags
from benchmarks.traffic import Traffic
from benchmarks.varied_models import MODELS, Model, write_repository
from benchmarks.varied_rows import LoadRow
from benchmarks.varied_table import Sample
from gpubridge.errors import BridgeError

__all__ = ["Bench", "compare_answers", "inferences", "load", "port_of", "repository"]


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


def repository(row: LoadRow, traffic: Traffic, bench: Bench) -> Path:
    """Write the models of a row to a repository."""
    models = [MODELS[name]() for name in (*traffic.models, *row.models)]
    return write_repository(models, bench.folder / row.name)


def port_of(server: ServerProcess, traffic: Traffic) -> int:
    """Return the port that takes the traffic."""
    return server.ports.of(traffic.protocol)


def inferences(traffic: Traffic, server: ServerProcess) -> int:
    """Return how many requests the statistics of the traffic's models count."""
    count = 0
    for model in set(traffic.models):
        address = f"http://127.0.0.1:{server.http_port}/v2/models/{model}/stats"
        with urllib.request.urlopen(address, timeout=60) as answer:
            entry = json.load(answer)["model_stats"][0]
            count += entry["inference_count"] + entry["inference_stats"]["cache_hit"]["count"]
    return count


def compare_answers(
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


def load(traffic: Traffic, row: LoadRow, server: ServerProcess, port: int, bench: Bench) -> Sample:
    """Load a server for a round; its figures, with the CPU time spent on a request."""
    counted, spent = inferences(traffic, server), cpu_seconds(server.pid)
    figures: LoadFigures = bench.client.run(
        traffic, port, row.connections, bench.seconds, tls=row.tls
    )
    spent = cpu_seconds(server.pid) - spent
    counted = inferences(traffic, server) - counted
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
