"""Clients of several implementations against a server; each is skipped where it is not installed.

grpc-js is looked for as Node looks for it (``NODE_PATH``).
"""

import asyncio
import json
import subprocess

import numpy as np
import pytest

from tests.process.foreign import run, tool, write_add_sub
from tests.process.server import running_server

service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

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
def server(repository):
    write_add_sub(repository)
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


@pytest.mark.extra
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
