"""Fleets of one, two and four servers on this machine, beside what the simulation says.

The model sleeps, as a process does that waits for a GPU.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fleet.simulation import Plan, Simulation

REPLICAS = (1, 2, 4)
CLIENTS = 8
_MODEL_SECONDS = 0.005
_START_SECONDS = 120
_MODEL = f"""
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            time.sleep({_MODEL_SECONDS})
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]))
        return answers
"""
_CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
"""
_BODY = json.dumps(
    {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
)


def measure(seconds: int) -> list[dict[str, float]]:
    """Return a row for each number of replicas: measured and predicted."""
    rows = []
    service = 0.0
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "sleeping" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL)
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        for replicas in REPLICAS:
            began = time.monotonic()
            with _fleet(folder, replicas) as port:
                start = time.monotonic() - began
                if not service:
                    # Of one client: nothing waits.
                    service = _load(port, 1, seconds)[1]
                rate, middle = _load(port, CLIENTS * replicas, seconds)
            plan = Plan(
                servers=replicas,
                service_seconds=service - Plan.proxy_seconds,
                clients=CLIENTS * replicas,
                seconds=5.0,
            )
            said = Simulation(plan).run()
            rows.append(
                {
                    "replicas": replicas,
                    "start": start,
                    "rate": rate,
                    "predicted rate": said.rate(0.5, 5.0),
                    "p50": middle,
                    "predicted p50": said.percentile(0.5),
                }
            )
    return rows


@contextlib.contextmanager
def _fleet(folder: str, replicas: int) -> Iterator[int]:
    """Run a fleet; gives its port of HTTP."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    command = [sys.executable, "-m", "gpubridge", "ray", "up", folder, f"--replicas={replicas}"]
    names = ("http", "grpc", "metrics")
    command += [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line == "ready\n":
                    break
            else:
                raise RuntimeError("the fleet does not start; its output is above")
            _wait_until_served(ports[0])
            yield ports[0]
        finally:
            process.terminate()


def _wait_until_served(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _ask(http.client.HTTPConnection("127.0.0.1", port, timeout=60)):
                return
        time.sleep(0.1)
    raise RuntimeError("the fleet does not answer")


def _ask(connection: http.client.HTTPConnection) -> bool:
    connection.request("POST", "/v2/models/sleeping/infer", _BODY)
    response = connection.getresponse()
    response.read()
    return response.status == 200


def _load(port: int, clients: int, seconds: float) -> tuple[float, float]:
    """Return the answers a second of clients that ask again at once, and their middle time."""
    took: list[float] = []
    end = time.monotonic() + seconds

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while (began := time.monotonic()) < end:
            if not _ask(connection):
                raise RuntimeError("a request was not answered")
            took.append(time.monotonic() - began)
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) / seconds, sorted(took)[len(took) // 2]
