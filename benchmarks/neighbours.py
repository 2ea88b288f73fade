"""The slowest small request beside a heavy one: does anybody wait for somebody else's work?

``python -m benchmarks.neighbours [--output FILE]`` starts a server and sends, one after the other, each
heavy request again and again for some seconds, while four neighbours ask for something small: binary
data and JSON over HTTP, gRPC, and the metrics page. It prints the slowest and the median of each.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton_grpc

from benchmarks.serve import Gpubridge
from benchmarks.server_process import ServerProcess

_SECONDS = 8.0
_PAUSE_SECONDS = 0.01
_ANSWER_SECONDS = 300.0
_NUMBERS = 1_500_000
_STRINGS = 4_000_000
_BOMB_BYTES = 1 << 30
_SPILLED_BYTES = 250_000_000

_ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
            for r in requests
        ]
"""
_SPILLING = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("x" * {size})
        return [pb_utils.InferenceResponse([], error) for _ in requests]
"""
_TENSOR = 'put [ {{ name: "{name}" data_type: TYPE_{kind} dims: [ -1 ] }} ]'


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for each heavy request")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--output", type=Path, help="write the table here, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpubridge-neighbours-") as folder:
        repository = Path(folder) / "models"
        _write_models(repository)
        with ServerProcess(Gpubridge(), repository, Path(folder) / "log") as server:
            server.wait_ready()
            table = "\n".join(_rows(server, options.seconds, options.only))
            server.check_alive()
    print(table)
    if options.output is not None:
        options.output.write_text(table + "\n", encoding="utf-8")
    return 0


def _write_models(repository: Path) -> None:
    spilling = _SPILLING.format(size=_SPILLED_BYTES)
    kinds = {"numbers": "FP64", "strings": "STRING", "small": "FP32", "spilling": "FP32"}
    for name, kind in kinds.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(spilling if name == "spilling" else _ECHO)
        tensors = [
            side + _TENSOR.format(name=tensor, kind=kind)
            for side, tensor in (("in", "IN"), ("out", "OUT"))
        ]
        config = "\n".join(['backend: "python"', *tensors])
        (folder.parent / "config.pbtxt").write_text(config)


def _rows(server: ServerProcess, seconds: float, only: str) -> Iterator[str]:
    """Yield a table: a row for each heavy request, a column for each neighbour."""
    neighbours = _neighbours(server)
    yield "| beside | heavy answers | " + " | ".join(neighbours) + " |"
    yield "|---" * (len(neighbours) + 2) + "|"
    for name, clients, send in _heavy_requests(server):
        if only not in name:
            continue
        over = threading.Event()
        sent: list[int] = []
        threads = [
            threading.Thread(target=_repeat, args=(send, over, sent)) for _ in range(clients)
        ]
        waits: dict[str, list[float]] = {each: [] for each in neighbours}
        for each, ask in neighbours.items():
            threads.append(threading.Thread(target=_ask, args=(ask, over, waits[each])))
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or not sent:
            time.sleep(_PAUSE_SECONDS)
        over.set()
        for thread in threads:
            thread.join()
        cells = [
            f"{1000 * max(times):.0f} ms (median {1000 * statistics.median(times):.1f})"
            for times in waits.values()
        ]
        yield f"| {name} | {len(sent)} | " + " | ".join(cells) + " |"


def _repeat(send: Callable[[], None], over: threading.Event, sent: list[int]) -> None:
    while not over.is_set():
        send()
        sent.append(1)


def _ask(ask: Callable[[], None], over: threading.Event, waits: list[float]) -> None:
    while not over.is_set():
        begin = time.perf_counter()
        ask()
        waits.append(time.perf_counter() - begin)
        time.sleep(_PAUSE_SECONDS)


def _document(datatype: str, values: list[object]) -> bytes:
    tensor = {"name": "IN", "datatype": datatype, "shape": [len(values)], "data": values}
    return json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()


def _binary(datatype: str, count: int, data: bytes) -> tuple[bytes, dict[str, str]]:
    size = {"binary_data_size": len(data)}
    tensor = {"name": "IN", "datatype": datatype, "shape": [count], "parameters": size}
    header = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    document = json.dumps(header).encode()
    return document + data, {"Inference-Header-Content-Length": str(len(document))}


def _poster(
    server: ServerProcess, model: str, body: bytes, headers: dict[str, str]
) -> Callable[[], None]:
    def post() -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.http_port, timeout=_ANSWER_SECONDS
        )
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        connection.getresponse().read()
        connection.close()

    return post


def _heavy_requests(
    server: ServerProcess,
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yield what each is called, how many clients send it at once, and how."""
    values = np.random.default_rng(0).normal(size=_NUMBERS).tolist()
    body = _document("FP64", values)
    yield f"JSON numbers, {len(body) / 1e6:.0f} MB", 1, _poster(server, "numbers", body, {})
    body = _document("BYTES", [f"{i:06}" for i in range(_STRINGS)])
    yield f"JSON strings, {len(body) / 1e6:.0f} MB", 1, _poster(server, "strings", body, {})
    data = b"\6\0\0\0abcdef" * _STRINGS
    body, headers = _binary("BYTES", _STRINGS, data)
    yield f"binary strings, {len(body) / 1e6:.0f} MB", 1, _poster(server, "strings", body, headers)
    bomb = gzip.compress(bytes(_BOMB_BYTES), 9)
    headers = {"Content-Encoding": "gzip"}
    yield "eight gzip bombs of 1 MB", 8, _poster(server, "numbers", bomb, headers)
    body = _document("FP32", [1.0])
    yield "an error of 250 MB from a stub", 1, _poster(server, "spilling", body, {})


def _neighbours(server: ServerProcess) -> dict[str, Callable[[], None]]:
    data = np.ones(4, np.float32)
    body, headers = _binary("FP32", 4, data.tobytes())
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")
    tensor = triton_grpc.InferInput("IN", [4], "FP32")
    tensor.set_data_from_numpy(data)

    def metrics() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports.metrics, timeout=60)
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        connection.close()

    return {
        "HTTP binary": _poster(server, "small", body, headers),
        "HTTP JSON": _poster(server, "small", _document("FP32", [1.0, 2.0]), {}),
        "gRPC": lambda: client.infer("small", [tensor]),
        "/metrics": metrics,
    }


if __name__ == "__main__":
    sys.exit(main())
