"""Clients of several implementations against a server; each is skipped where it is not installed.

grpc-js is looked for as Node looks for it (``NODE_PATH``), perf_analyzer on PATH or in the folder
that ``GPUBRIDGE_PEER`` names.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.process.server import running_server, write_model

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

ADD_SUB = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (tensor.as_numpy() for tensor in request.inputs())
            outputs = [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
RUNNING_SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value, start, end, ready, corrid = (tensor.as_numpy() for tensor in request.inputs())
        key = int(corrid.flat[0])
        if ready.flat[0]:
            before = 0 if start.flat[0] else self.sums[key]
            self.sums[key] = np.int32((int(before) + int(value.flat[0])) % 1000)
        total = np.full(value.shape, self.sums.get(key, 0), np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total)])
"""
SEQUENCES = """
max_batch_size: 4
sequence_batching {
  control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] },
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }] },
    { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }] }
  ]
}
"""
INFER = "/inference.GRPCInferenceService/ModelInfer"

GRPC_JS = """
const grpc = require('@grpc/grpc-js');
const fs = require('fs');
const [address, body, compression] = process.argv.slice(2);
const request = fs.readFileSync(body);
const method = (path, requestStream, responseStream) => ({
  path, requestStream, responseStream,
  requestSerialize: x => x, requestDeserialize: x => x,
  responseSerialize: x => x, responseDeserialize: x => x,
});
const Client = grpc.makeGenericClientConstructor({
  infer: method('/inference.GRPCInferenceService/ModelInfer', false, false),
  stream: method('/inference.GRPCInferenceService/ModelStreamInfer', true, true),
  watch: method('/grpc.health.v1.Health/Watch', false, true),
  missing: method('/inference.GRPCInferenceService/Missing', false, false),
}, 'service');
const client = new Client(address, grpc.credentials.createInsecure(),
  {'grpc.default_compression_algorithm': Number(compression)});
const say = (...words) => console.log(...words);
const fail = error => { console.log('failed', error.message); process.exit(1); };

let left = 300;
for (let i = 0; i < 300; i++) {
  client.infer(request, (error, answer) => {
    if (error) fail(error);
    if (--left === 0) { say('infer', answer.toString('hex')); stream(); }
  });
}
function stream() {
  const call = client.stream();
  let came = 0;
  call.on('data', () => { if (++came === 50) call.end(); });
  call.on('error', fail);
  call.on('status', status => { say('stream', came, status.code); watch(); });
  for (let i = 0; i < 50; i++) call.write(request);
}
function watch() {
  const call = client.watch(Buffer.alloc(0));
  call.on('data', state => { say('watch', state.toString('hex')); call.cancel(); });
  call.on('error', error => { say('cancelled', error.code); missing(); });
}
function missing() {
  client.missing(Buffer.alloc(0), error => { say('missing', error.code); client.close(); });
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    vector = "data_type: TYPE_FP32 dims: [16]"
    write_model(
        repository,
        "add_sub",
        ADD_SUB,
        inputs=f'name: "A" {vector} }}, {{ name: "B" {vector}',
        outputs=f'name: "SUM" {vector} }}, {{ name: "DIFFERENCE" {vector}',
    )
    write_model(
        repository,
        "running_sum",
        RUNNING_SUM,
        config=SEQUENCES,
        inputs='name: "VALUE" data_type: TYPE_INT32 dims: [1]',
        outputs='name: "TOTAL" data_type: TYPE_INT32 dims: [1]',
    )
    with running_server(repository) as running:
        yield running


@pytest.fixture
def message():
    """A ModelInferRequest of add_sub."""
    request = service_pb2.ModelInferRequest(model_name="add_sub")
    for name in ("A", "B"):
        request.inputs.add(name=name, datatype="FP32", shape=[16])
        request.raw_input_contents.append(np.arange(16, dtype=np.float32).tobytes())
    return request.SerializeToString()


@pytest.fixture
def framed(message, tmp_path):
    """A file with the request as gRPC sends it."""
    path = tmp_path / "framed"
    path.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    return path


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on PATH")
    return path


def run(*command, **environment) -> str:
    """Run a client; returns what it printed."""
    finished = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    said = (finished.stdout + finished.stderr).decode(errors="replace")
    assert finished.returncode == 0, said
    return said


def check_answer(data: bytes) -> None:
    answer = service_pb2.ModelInferResponse.FromString(data)
    twice = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert twice.tolist() == [2.0 * n for n in range(16)]


GRPC_HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


def test_h2load(server, framed):
    said = run(
        tool("h2load"), "-n2000", "-c4", "-m8", "-d", framed, *GRPC_HEADERS,
        f"http://{server.grpc_url}{INFER}",
    )  # fmt: skip
    assert "2000 succeeded, 0 failed, 0 errored" in said


def test_h2load_over_http1(server):
    said = run(tool("h2load"), "--h1", "-n2000", "-c4", f"http://{server.http_url}/v2")
    assert "2000 succeeded, 0 failed, 0 errored" in said


def test_nghttp(server, framed):
    said = run(
        tool("nghttp"), "-nv", "-d", framed, "-H", ":method: POST", *GRPC_HEADERS,
        f"http://{server.grpc_url}{INFER}",
    )  # fmt: skip
    assert "grpc-status: 0" in said


def test_curl_over_http2(server, framed, tmp_path):
    curl = tool("curl")
    if "HTTP2" not in run(curl, "--version"):
        pytest.skip("curl was built without HTTP/2")
    answer = tmp_path / "answer"
    said = run(
        curl, "-sS", "--http2-prior-knowledge", *GRPC_HEADERS, "--data-binary", f"@{framed}",
        "-o", answer, "-D", "-", f"http://{server.grpc_url}{INFER}",
    )  # fmt: skip
    assert "grpc-status: 0" in said
    check_answer(answer.read_bytes()[5:])


@pytest.mark.parametrize(
    "options",
    [[], ["--compressed"], ["-H", "Transfer-Encoding: chunked"], ["-0"], ["-H", "Expect: 100-continue"]],
    ids=["plain", "compressed", "chunked", "http1.0", "expect"],
)  # fmt: skip
def test_curl_over_http1(server, options):
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [16], "data": list(range(16))} for name in "AB"
    ]
    said = run(
        tool("curl"), "-sS", *options, "-d", json.dumps({"inputs": tensors}),
        f"http://{server.http_url}/v2/models/add_sub/infer",
    )  # fmt: skip
    assert json.loads(said)["outputs"][0]["data"] == [2.0 * n for n in range(16)]


@pytest.mark.parametrize("compression", [0, 1, 2], ids=["identity", "deflate", "gzip"])
def test_grpc_js(server, message, tmp_path, compression):
    node = tool("node")
    script = tmp_path / "client.js"
    script.write_text(GRPC_JS)
    probe = [node, "-e", "require.resolve('@grpc/grpc-js')"]
    if subprocess.run(probe, capture_output=True, cwd=tmp_path, check=False).returncode:
        pytest.skip("@grpc/grpc-js is not on NODE_PATH")
    body = tmp_path / "body"
    body.write_bytes(message)
    lines = run(node, script, server.grpc_url, body, compression).splitlines()
    word, answer = lines[0].split()
    assert word == "infer"
    check_answer(bytes.fromhex(answer))
    assert lines[1:] == ["stream 50 0", "watch 0801", "cancelled 1", "missing 12"]


def test_grpcio_asyncio_with_everything_at_once(server, message):
    grpc = pytest.importorskip("grpc")

    async def client():
        options = [("grpc.keepalive_time_ms", 10_000)]
        async with grpc.aio.insecure_channel(server.grpc_url, options) as channel:
            infer = channel.unary_unary(INFER)
            gzip = grpc.Compression.Gzip
            answers = await asyncio.gather(*[infer(message, compression=gzip) for _ in range(200)])
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
                message for _ in range(50)
            )
            streamed = [answer async for answer in stream]
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            state = await watch.read()
            watch.cancel()
        return answers, streamed, state

    answers, streamed, state = asyncio.run(client())
    for answer in answers:
        check_answer(answer)
    assert len(streamed) == 50
    assert state == b"\x08\x01"


def perf_analyzer() -> tuple[str, dict[str, str]]:
    peer = os.environ.get("GPUBRIDGE_PEER")
    if peer and (path := Path(peer) / "perf_analyzer").exists():
        return str(path), {"LD_LIBRARY_PATH": str(Path(peer) / "lib")}
    return tool("perf_analyzer"), {}


MODES = {
    "http": "-i http",
    "http, asynchronous": "-i http --async",
    "grpc": "-i grpc",
    "grpc, asynchronous": "-i grpc --async",
    "grpc, streaming": "-i grpc --async --streaming",
    "grpc, gzip": "-i grpc --grpc-compression-algorithm gzip",
}
LOADS = {
    "concurrency": "-m add_sub --concurrency-range 1:3",
    "rate": "-m add_sub --request-rate-range 200:300:100",
    "intervals": "-m add_sub --request-intervals INTERVALS",
    "sequences": "-m running_sum --concurrency-range 5 --sequence-length 6",
    "sequences by rate": "-m running_sum --request-rate-range 100 --num-of-sequences 6 "
    "--sequence-length 4 --sequence-id-range 100:5000",
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mode", MODES)
def test_perf_analyzer(server, tmp_path, mode, load):
    if "gzip" in mode and load != "concurrency":
        pytest.skip("one load is enough for gzip")
    path, environment = perf_analyzer()
    intervals = tmp_path / "intervals"
    intervals.write_text("5000\n10000\n")
    url = server.http_url if "http" in mode else server.grpc_url
    flags = f"{MODES[mode]} {LOADS[load]}".replace("INTERVALS", str(intervals)).split()
    # It measures until it is sure; this makes it sure at once.
    said = run(
        path, "-u", url, *flags, "--measurement-interval", "200", "--stability-percentage", "999",
        "--max-trials", "3", **environment,
    )  # fmt: skip
    rates = [float(rate) for rate in re.findall(r"throughput: ([0-9.]+) infer/sec", said)]
    assert rates, said
    assert min(rates) > 0, said
