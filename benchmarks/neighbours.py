"""The slowest small request beside a heavy one: whether requests wait for the work of others.

``python -m benchmarks.neighbours [--output FILE]`` starts a server and sends, one after the other, each
heavy request again and again for some seconds, from processes of their own, while four neighbours ask
for something small: binary data and JSON over HTTP, gRPC, and the metrics page. It prints the slowest and
the median of each.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import http.client
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import triton_to_np_dtype

from benchmarks.serve import Gpubridge
from benchmarks.server_process import Launch, Ports, ServerProcess

_SECONDS = 8.0
_PAUSE_SECONDS = 0.01
_ANSWER_SECONDS = 300.0
_READ_BYTES = 1 << 20
_NUMBERS = 1_500_000
_STRINGS = 4_000_000
_BOMB_BYTES = 1 << 30
_SPILLED_BYTES = 250_000_000
_PARAMETER_BYTES = 240_000_000
_PARAMETERS = 16_000
_MESSAGE_BYTES = 120_000_000
_LOGGED_BYTES = 50_000_000
_VALUES = 10_000_000
_CLASSES = 1_000_000
_TENSORS = 5_000
_CONFIGURED = 3_000
_FILE_BYTES = 40_000_000
_LOADED_BYTES = 200_000_000
_GRPC_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        {0}
"""
_ECHO = (
    "return pb_utils.InferenceResponse([pb_utils.Tensor('OUT', request.inputs()[0].as_numpy())])"
)
_TOLD = (
    "out = pb_utils.Tensor('OUT', request.inputs()[0].as_numpy()[:1]);"
    "return pb_utils.InferenceResponse([out], parameters={{'text': 'x' * {}}})"
)
_CALL = (
    "called = pb_utils.InferenceRequest(model_name='{}', inputs=request.inputs(),"
    " requested_output_names=['OUT'], parameters={{'text': 'x' * {}}}).exec();"
    "return pb_utils.InferenceResponse(called.output_tensors())"
)
_MANY = (
    f"out = pb_utils.Tensor('OUT', np.random.default_rng(0).normal(size={_VALUES}));"
    "return pb_utils.InferenceResponse([out])"
)
_LOADING = (
    "files = {'file:1/model.py': open(__file__, 'rb').read().replace(b'load_model', b'exec'),"
    f" 'file:1/data': bytes({_LOADED_BYTES})}};"
    'config = \'{"backend": "python"}\';'
    "pb_utils.load_model('loaded', config=config, files=files);" + _ECHO
)
_FAILURE = f"return pb_utils.InferenceResponse([], pb_utils.TritonError('x' * {_SPILLED_BYTES}))"
_MODELS = {
    "numbers": ("FP64", _ECHO),
    "strings": ("STRING", _ECHO),
    "small": ("FP32", _ECHO),
    "other": ("FP32", _ECHO),
    "failing": ("FP32", _FAILURE),
    "telling": ("FP32", _TOLD.format(_PARAMETER_BYTES)),
    "logging": ("FP32", f"pb_utils.Logger.log_info('x' * {_LOGGED_BYTES});" + _ECHO),
    "asking": ("FP32", _CALL.format("telling", 1)),
    "many": ("FP64", _MANY),
    "loading": ("FP32", _LOADING),
    "calling": ("FP32", _CALL.format("other", _PARAMETER_BYTES)),
}
_MEMBER = """
input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
platform: "ensemble"
ensemble_scheduling {{ step [ {{
    model_name: "{}" model_version: -1
    input_map {{ key: "IN" value: "IN" }}
    output_map {{ key: "OUT" value: "OUT" }}
}} ] }}
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
        with ServerProcess(_LoadedByClients(), repository, Path(folder) / "log") as server:
            server.wait_ready()
            rows = []
            for row in _rows(server, options.seconds, options.only):
                print(row, flush=True)
                rows.append(row + "\n")
            server.check_alive()
    if options.output is not None:
        options.output.write_text("".join(rows), encoding="utf-8")
    return 0


class _LoadedByClients(Gpubridge):
    """The server with all models, and clients that load others."""

    def launch(self, repository: Path, ports: Ports) -> Launch:
        """Return how to serve the repository."""
        launch = super().launch(repository, ports)
        control = ["--model-control-mode=explicit", "--load-model=*"]
        return replace(launch, command=[*launch.command, *control])


def _write_models(repository: Path) -> None:
    for name, (kind, code) in _MODELS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL.format(code))
        tensors = [
            side + _TENSOR.format(name=tensor, kind=kind)
            for side, tensor in (("in", "IN"), ("out", "OUT"))
        ]
        config = "\n".join(['backend: "python"', *tensors])
        (folder.parent / "config.pbtxt").write_text(config)
    outputs = [_TENSOR.format(name=f"OUT{i}", kind="FP32") for i in range(_TENSORS)]
    folder = repository / "wide" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL.format(_ECHO))
    inputs = "in" + _TENSOR.format(name="IN", kind="FP32")
    tensors = ['backend: "python"', inputs, *(f"out{output}" for output in outputs)]
    (folder.parent / "config.pbtxt").write_text("\n".join(tensors))
    for member in ("failing", "telling"):
        folder = repository / f"ensemble_of_{member}" / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(_MEMBER.format(member))


def _rows(server: ServerProcess, seconds: float, only: str) -> Iterator[str]:
    """Yield a table: a row for each heavy request, a column for each neighbour."""
    neighbours = _neighbours(server)
    yield "| beside | heavy answers | " + " | ".join(neighbours) + " |"
    yield "|---" * (len(neighbours) + 2) + "|"
    spawning = multiprocessing.get_context("spawn")
    for name, clients, send in _heavy_requests(server):
        if only not in name:
            continue
        over, sent = spawning.Event(), spawning.Value("i", 0)
        senders = [
            spawning.Process(target=_repeat, args=(send, over, sent)) for _ in range(clients)
        ]
        for sender in senders:
            sender.start()
        waits: dict[str, list[float]] = {each: [] for each in neighbours}
        threads = [
            threading.Thread(target=_ask, args=(ask, over, waits[each]))
            for each, ask in neighbours.items()
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or not sent.value:
            time.sleep(_PAUSE_SECONDS)
        over.set()
        for thread in threads:
            thread.join()
        for sender in senders:
            sender.join()
        cells = [
            f"{1000 * max(times):.0f} ms (median {1000 * statistics.median(times):.1f})"
            for times in waits.values()
        ]
        yield f"| {name} | {sent.value} | " + " | ".join(cells) + " |"


def _repeat(send: Callable[[], None], over: Event, sent: Synchronized[int]) -> None:
    while not over.is_set():
        send()
        with sent.get_lock():
            sent.value += 1


def _ask(ask: Callable[[], None], over: Event, waits: list[float]) -> None:
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


def _request(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    connection.request(method, f"/v2/{path}", body, headers or {})
    response = connection.getresponse()
    while response.read(_READ_BYTES):
        pass
    connection.close()


def _post(port: int, model: str, body: bytes, headers: dict[str, str]) -> None:
    _request(port, "POST", f"models/{model}/infer", body, headers)


def _call(port: int, model: str, parameter: int = 0, coding: str | None = None) -> None:
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=_GRPC_LIMIT)
    parameters = {"text": "x" * parameter}
    tensor = _tensor(_SPILLED_BYTES // 4 if coding else 1)
    client.infer(model, [tensor], parameters=parameters, compression_algorithm=coding)
    client.close()


def _classify(port: int, model: str) -> None:
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=_GRPC_LIMIT)
    output = triton_grpc.InferRequestedOutput("OUT", class_count=_CLASSES)
    client.infer(model, [_tensor(1, "FP64")], outputs=[output])
    client.close()


def _stream(port: int, model: str, elements: int) -> None:
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{port}", channel_args=_GRPC_LIMIT)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, [_tensor(elements)])
    answers.get(timeout=_ANSWER_SECONDS)
    client.close()


def _send(port: int, message: bytes, *, streamed: bool = False, method: str = "ModelInfer") -> None:
    """Send a message of a method, whatever the answer."""
    service = "/inference.GRPCInferenceService/"
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", _GRPC_LIMIT)
    with channel, contextlib.suppress(grpc.RpcError):
        if streamed:
            list(channel.stream_stream(f"{service}ModelStreamInfer")(iter([message])))
        else:
            channel.unary_unary(f"{service}{method}")(message)


def _message(model: str) -> Any:
    return triton_grpc.service_pb2.ModelInferRequest(model_name=model)


def _long_parameters() -> bytes:
    """Return a request with as many parameters as may be, whose names are long."""
    request = _message("other")
    for number in range(_PARAMETERS):
        name = f"{number:05}" + "n" * (_PARAMETER_BYTES // _PARAMETERS)
        request.parameters[name].int64_param = number
    return bytes(request.SerializeToString())


def _typed(model: str, datatype: str, field: str, values: list[Any]) -> bytes:
    """Return a request with typed contents."""
    request = _message(model)
    tensor = request.inputs.add(name="IN", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    return bytes(request.SerializeToString())


def _raw(model: str) -> bytes:
    """Return a request with raw contents."""
    request = _message(model)
    request.inputs.add(name="IN", datatype="FP32", shape=[_PARAMETER_BYTES // 4])
    request.raw_input_contents.append(bytes(_PARAMETER_BYTES))
    return bytes(request.SerializeToString())


def _tensor(elements: int, datatype: str = "FP32") -> triton_grpc.InferInput:
    tensor = triton_grpc.InferInput("IN", [elements], datatype)
    tensor.set_data_from_numpy(np.ones(elements, triton_to_np_dtype(datatype)))
    return tensor


def _configuration(inputs: int) -> bytes:
    """Return a load's body whose configuration has as many inputs, of about a kilobyte each."""
    tensors = [
        {"name": f"IN{i}", "data_type": "TYPE_FP32", "dims": [1] * 480} for i in range(inputs)
    ]
    config = json.dumps({"backend": "python", "input": tensors}, separators=(",", ":"))
    return json.dumps({"parameters": {"config": config}}).encode()


def _file_load() -> bytes:
    """Return a load's body with a large file."""
    files = {
        "file:1/model.py": _MODEL.format(_ECHO).encode(),
        "file:1/data": bytes(_FILE_BYTES),
    }
    encoded = {name: base64.b64encode(data).decode() for name, data in files.items()}
    return json.dumps({"parameters": {"config": '{"backend": "python"}', **encoded}}).encode()


def _file_message() -> bytes:
    """Return a load's message with a large file."""
    request = triton_grpc.service_pb2.RepositoryModelLoadRequest(model_name="loaded")
    request.parameters["config"].string_param = '{"backend": "python"}'
    request.parameters["file:1/model.py"].bytes_param = _MODEL.format(_ECHO).encode()
    request.parameters["file:1/data"].bytes_param = bytes(_LOADED_BYTES)
    return bytes(request.SerializeToString())


_Row = tuple[str, int, Callable[[], None]]


def _heavy_requests(server: ServerProcess) -> Iterator[_Row]:
    """Yield what each is called, how many clients send it at once, and how."""
    yield from _long_tensors(server)
    yield from _long_texts(server)
    yield from _long_messages(server)
    yield from _long_answers(server)
    yield from _loads(partial(_request, server.http_port))
    send = partial(_send, server.ports.grpc, method="RepositoryModelLoad")
    yield "a load of 200 MB over gRPC", 1, partial(send, _file_message())


def _long_tensors(server: ServerProcess) -> Iterator[_Row]:
    post = partial(_post, server.http_port)
    values = np.random.default_rng(0).normal(size=_NUMBERS).tolist()
    body = _document("FP64", values)
    yield f"JSON numbers, {len(body) / 1e6:.0f} MB", 1, partial(post, "numbers", body, {})
    body = _document("BYTES", [f"{i:06}" for i in range(_STRINGS)])
    yield f"JSON strings, {len(body) / 1e6:.0f} MB", 1, partial(post, "strings", body, {})
    document = json.dumps({"IN": values}).encode()
    send = partial(_request, server.http_port, "POST")
    generate = partial(send, "models/numbers/generate", document)
    yield f"the same for generate, {len(document) / 1e6:.0f} MB", 1, generate
    wrong = partial(send, "models/numbers/generate", document[:-1])
    yield "the same, malformed at its end", 1, wrong
    wrong = partial(send, "models/strings/infer", body[:-1])
    yield "JSON strings, malformed at their end", 1, wrong
    data = b"\6\0\0\0abcdef" * _STRINGS
    body, headers = _binary("BYTES", _STRINGS, data)
    yield f"binary strings, {len(body) / 1e6:.0f} MB", 1, partial(post, "strings", body, headers)
    bomb = gzip.compress(bytes(_BOMB_BYTES), 9)
    headers = {"Content-Encoding": "gzip"}
    yield "eight gzip bombs of 1 MB", 8, partial(post, "numbers", bomb, headers)


def _long_texts(server: ServerProcess) -> Iterator[_Row]:
    post, call = partial(_post, server.http_port), partial(_call, server.ports.grpc)
    body = _document("FP32", [1.0])
    yield "an error of 250 MB from a stub", 1, partial(post, "failing", body, {})
    yield "the same through an ensemble", 1, partial(post, "ensemble_of_failing", body, {})
    yield "response parameters of 240 MB, HTTP", 1, partial(post, "telling", body, {})
    yield "response parameters of 240 MB, gRPC", 1, partial(call, "telling")
    yield "the same of an ensemble", 1, partial(post, "ensemble_of_telling", body, {})
    yield "the same to a model that calls", 1, partial(post, "asking", body, {})
    yield "a call with parameters of 240 MB", 1, partial(post, "calling", body, {})
    yield "a log message of 50 MB", 1, partial(post, "logging", body, {})
    large = json.dumps({**json.loads(body), "parameters": {"text": "x" * 50_000_000}}).encode()
    yield "request parameters of 50 MB, HTTP", 1, partial(post, "other", large, {})


def _long_messages(server: ServerProcess) -> Iterator[_Row]:
    call = partial(_call, server.ports.grpc)
    yield "request parameters of 240 MB, gRPC", 1, partial(call, "other", _PARAMETER_BYTES)
    send = partial(_send, server.ports.grpc)
    long = _message("other")
    long.parameters["text"].string_param = "x" * _PARAMETER_BYTES
    yield "the same on a stream", 1, partial(send, long.SerializeToString(), streamed=True)
    yield "parameters with long names, gRPC", 1, partial(send, _long_parameters())
    floats = _typed("other", "FP32", "fp32_contents", [1.5] * (_MESSAGE_BYTES // 4))
    yield "typed floats of 120 MB, gRPC", 1, partial(send, floats)
    strings = _typed("strings", "BYTES", "bytes_contents", [b"abcdef"] * _STRINGS * 4)
    yield "typed strings of 128 MB, gRPC", 1, partial(send, strings)
    yield "240 MB for a model that there is not, gRPC", 1, partial(send, _raw("missing"))
    stream = partial(_stream, server.ports.grpc, "other", _MESSAGE_BYTES // 4)
    yield "a stream's message of 120 MB", 1, stream
    yield "a gzip message of 250 MB, gRPC", 1, partial(call, "other", 0, "gzip")
    identified = _message("other")
    identified.id = "x" * _LOGGED_BYTES
    yield "an id of 50 MB, gRPC", 1, partial(send, identified.SerializeToString())


def _long_answers(server: ServerProcess) -> Iterator[_Row]:
    yield "classes of 10 M values, gRPC", 1, partial(_classify, server.ports.grpc, "many")
    body = _document("FP64", [1.0])
    yield "10 M numbers as JSON", 1, partial(_post, server.http_port, "many", body, {})
    ask = partial(_request, server.http_port)
    event = partial(ask, "POST", "models/many/generate_stream", b'{"IN":1.0}')
    yield "10 M numbers in an event", 1, event
    yield "a configuration of 5,000 outputs", 1, partial(ask, "GET", "models/wide/config")


def _loads(ask: Callable[..., None]) -> Iterator[_Row]:
    load = partial(ask, "POST", "repository/models/other/load")
    body = _configuration(_CONFIGURED)
    yield "a load with a configuration of 3,000 inputs", 1, partial(load, body)
    load = partial(ask, "POST", "repository/models/loaded/load")
    yield "a load with a file of 40 MB", 1, partial(load, _file_load())
    call = partial(ask, "POST", "models/loading/infer", _document("FP32", [1.0]))
    yield "a load of 200 MB by a model", 1, call


def _neighbours(server: ServerProcess) -> dict[str, Callable[[], None]]:
    data = np.ones(4, np.float32)
    body, headers = _binary("FP32", 4, data.tobytes())
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")
    tensor, post = _tensor(4), partial(_post, server.http_port)

    def metrics() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports.metrics, timeout=60)
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        connection.close()

    return {
        "HTTP binary": partial(post, "small", body, headers),
        "HTTP JSON": partial(post, "small", _document("FP32", [1.0, 2.0]), {}),
        "gRPC": lambda: client.infer("small", [tensor]),
        "/metrics": metrics,
    }


if __name__ == "__main__":
    sys.exit(main())
