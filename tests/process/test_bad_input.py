"""Clients that do everything wrong: each is told so, and nobody else notices.

After every test the server must answer a good request; at the end it must hold nothing that it did
not hold before.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.process.raw_http import binary_request, connected, inference, read_answer, read_head
from tests.process.server import running_server, wait_until, write_model

MIB = 1 << 20
BIG = 4 * MIB
"""Elements of an output of 16 MiB: far beyond what sockets hold."""

ADD = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", a + b)]))
        return responses
"""

STRINGS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
                for r in requests]
"""

FILL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value, count = request.inputs()[0].as_numpy()
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.full(int(count), value, np.float32))]))
        return responses
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    pair = (
        'name: "A" data_type: TYPE_FP32 dims: [-1] }, { name: "B" data_type: TYPE_FP32 dims: [-1]'
    )
    string = "data_type: TYPE_STRING dims: [-1]"
    write_model(repository, "add", ADD, inputs=pair)
    write_model(
        repository,
        "strings",
        STRINGS,
        inputs=f'name: "IN" {string}',
        outputs=f'name: "OUT" {string}',
    )
    write_model(repository, "fill", FILL, inputs='name: "IN" data_type: TYPE_INT64 dims: [2]')
    # So little memory that a leak of a few bodies is the end of it.
    with running_server(repository, "--request-arena-limit", str(96 * MIB)) as server:
        warm_up(server)
        held = holdings(server)
        yield server
        warm_up(server)
        wait_until(lambda: holdings(server) <= held, f"{holdings(server)} to be {held} again")
        gauges = server.metrics()
        pending = [value for name, value in gauges.items() if "pending_request_count" in name]
        assert pending == [0] * 3
        assert not any(value for name, value in gauges.items() if "stub_restarts" in name)
        assert "Traceback" not in server.log()
        assert server.stop() == 0


@pytest.fixture(autouse=True)
def good_before_and_after(server):
    yield
    good(server)


def post(server, model, body, field):
    return server.request("POST", f"/v2/models/{model}/infer", body, dict([field.split(": ")]))


def good(server):
    """Send a request that must succeed."""
    array = np.arange(5, dtype=np.float32)
    field, body = binary_request(
        [("A", "FP32", [5], array.tobytes()), ("B", "FP32", [5], array.tobytes())]
    )
    status, fields, answer = post(server, "add", body, field)
    assert status == 200, answer
    binary = answer[
        int({k.lower(): v for k, v in fields.items()}["inference-header-content-length"]) :
    ]
    np.testing.assert_array_equal(np.frombuffer(binary, np.float32), array + array)


def warm_up(server):
    """Use every model and every size, so that what is kept for the next time is there."""
    good(server)
    for count in (1, BIG):
        with connected(server.http_url) as sock:
            sock.sendall(fill(1, count))
            assert read_answer(sock)[0] == 200
    field, body = binary_request([("IN", "BYTES", [1], b"\1\0\0\0a")])
    status = post(server, "strings", body, field)[0]
    assert status == 200


def holdings(server):
    """Sockets, pipes and threads of the server and its stubs, without the memory of the arenas."""
    counts = []
    for pid in sorted([server.pid, *server.stubs()]):
        links = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.append(entry.readlink().name)
            except FileNotFoundError:
                continue
        counts.append(sum("memfd:" not in link for link in links))
        counts.append(len(list(Path(f"/proc/{pid}/task").iterdir())))
    return counts


def fill(value, count):
    data = np.array([value, count], np.int64).tobytes()
    field, body = binary_request([("IN", "INT64", [2], data)])
    return inference("fill", body, field)


def entry(name="A", shape=(2,), datatype="FP32", **members):
    return {"name": name, "shape": list(shape), "datatype": datatype, **members}


def both(a, **members):
    return {"inputs": [a, entry("B", data=[1, 2])], **members}


def binary(size, **members):
    return entry(parameters={"binary_data_size": size}, **members)


A, B = entry(data=[1, 2]), entry("B", data=[1, 2])

BODIES = {
    "not JSON": (b"nope", 500, "failed to parse the request JSON buffer"),
    "empty": (b"", 400, "Raw request must only have 1 input"),
    "half a document": (b'{"inputs":[', 500, "failed to parse"),
    "an array": ([], 500, "Unable to parse 'inputs'"),
    "a number": (b"5", 500, "Unable to parse 'inputs'"),
    "not UTF-8": (b'{"inputs":"\xff"}', 500, "failed to parse"),
    "no inputs": ({}, 500, "non-existing object member 'inputs'"),
    "inputs are no array": ({"inputs": 5}, 500, "non-array as array"),
    "inputs are numbers": ({"inputs": [5, 6]}, 400, "no field is set"),
    "identifier is a number": (both(A, id=5), 500, "Unable to parse 'id'"),
    "an input is missing": ({"inputs": [A]}, 400, "expected 2 inputs but got 1 inputs"),
    "no input": ({"inputs": []}, 400, "expected 2 inputs but got 0 inputs"),
    "an input too many": ({"inputs": [A, B, entry("C", data=[1, 2])]}, 400, "but got 3 inputs"),
    "an input twice": ({"inputs": [A, A]}, 400, "input 'A' already exists in request"),
    "an unknown input": (both(entry("X", data=[1, 2])), 400, "unexpected inference input 'X'"),
    "no such datatype": (both(entry(datatype="FP31", data=[1])), 400, "invalid datatype"),
    "datatype is a list": (both(entry(datatype=["FP32"], data=[1])), 500, "'datatype'"),
    "another datatype": (both(entry(datatype="INT32", data=[1, 2])), 400, "data-type is 'INT32'"),
    "another rank": (both(entry(shape=(1, 2), data=[1, 2])), 400, "unexpected shape"),
    "a negative dim": (both(entry(shape=(-1,), data=[1])), 500, "unsigned-integer"),
    "a fractional dim": (both(entry(shape=(1.5,), data=[1])), 500, "unsigned-integer"),
    "a huge dim": (both(entry(shape=(1 << 63,), data=[1])), 400, "a dim beyond 63 bits"),
    "a dim beyond 64 bits": (both(entry(shape=(1 << 70,), data=[1])), 500, "unsigned-integer"),
    "shape is a number": (both({**A, "shape": 5}), 500, "non-array as array"),
    "too few values": (both(entry(shape=(3,), data=[1, 2])), 500, "Shape does not match"),
    "too many values": (both(entry(shape=(1,), data=[1, 2])), 500, "Shape does not match"),
    "a value of another type": (both(entry(data=[1, "2"])), 500, "non-number as double"),
    "values are objects": (both(entry(data=[{}, {}])), 500, "non-number as double"),
    "data is an object": (both(entry(data={})), 500, "non-array as array"),
    "data and a size": (both({**A, "parameters": {"binary_data_size": 8}}), 400, "But set"),
    "parameters are a number": (both(entry(parameters=7)), 500, "non-object"),
    "the request's too": (both(A, parameters=5), 500, "non-object"),
    "an output's too": (both(A, outputs=[{"name": "OUT", "parameters": 5}]), 500, "non-object"),
    "outputs are numbers": (both(A, outputs=[5]), 500, "Unable to parse 'name'"),
    "an unknown output": (both(A, outputs=[{"name": "X"}]), 400, "unexpected inference output 'X'"),
    "binary_data is a number": (
        both(A, outputs=[{"name": "OUT", "parameters": {"binary_data": 1}}]),
        500,
        "non-boolean as boolean",
    ),
    "a reserved parameter": (both(A, parameters={"triton_x": 1}), 400, "reserved"),
    "a parameter that is a list": (both(A, parameters={"x": []}), 400, "has invalid type"),
    "a size beyond the body": (both(binary(8)), 400, "unexpected size for input 'A'"),
    "a huge size": (both(binary(1 << 63)), 400, ""),
    "a negative size": (both(binary(-1)), 500, "'binary_data_size'"),
    "a fractional size": (both(binary(8.0)), 500, "'binary_data_size'"),
    "an unknown region": (
        both(entry(parameters={"shared_memory_region": "r"})),
        404,
        "Unable to find shared memory region: 'r'",
    ),
    "a deep document": (b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 500, ""),
    "a deep document that does not end": (b'{"inputs":' + b"[" * 100_000, 500, ""),
    "deep with a NaN": (b'{"x":NaN,"inputs":' + b"[" * 100_000, 500, "failed to parse"),
    "deep objects": (b'{"inputs":' * 100_000, 500, "failed to parse"),
    "lone surrogates with a NaN": (
        b'{"x":NaN,"id":"\\ud800","inputs":' + json.dumps([A, B]).encode() + b"}",
        500,
        "failed to parse",
    ),
}


@pytest.mark.parametrize(("body", "status", "text"), BODIES.values(), ids=BODIES.keys())
def test_bodies_that_are_no_request(server, body, status, text):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    got, fields, answer = server.request("POST", "/v2/models/add/infer", body)
    assert (got, fields["Content-Type"]) == (status, "application/json")
    assert text in json.loads(answer)["error"]


def test_numbers_beyond_64_bits_beside_a_nan(server):
    data = f"[NaN, {10**400}]"
    body = (
        f'{{"inputs":[{json.dumps(B)},{{"name":"A","shape":[2],"datatype":"FP32","data":{data}}}]}}'
    )
    status, _, answer = server.request("POST", "/v2/models/add/infer", body)
    assert status == 200
    assert b"[NaN,Infinity]" in answer


TARGETS = [
    ("GET", "/v2/models/add/infer", 405),
    ("POST", "/v2/health/live", 405),
    ("DELETE", "/v2", 405),
    ("POST", "/v2/models/nope/infer", 404),
    ("POST", "/v2/models/add/versions/2/infer", 404),
    ("POST", "/v2/models/add/versions/x/infer", 404),
    ("GET", f"/v2/models/add/versions/{'9' * 30}/config", 400),
    ("GET", "/v2/models/nope/ready", 400),
    ("GET", "/v2/models/../../etc/passwd", 404),
    ("GET", "//v2/health/live", 404),
    ("GET", "/v2/health/live/", 404),
    ("GET", "/", 404),
    ("POST", "/v2/models//infer", 404),
    ("POST", "/v2/models/%61dd/infer", 404),
    ("OPTIONS", "*", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), TARGETS)
def test_paths_and_methods_that_do_not_exist(server, method, path, status):
    body = b"{}" if method == "POST" else None
    got, _, answer = server.request(method, path, body)
    assert got == status
    assert json.loads(answer)["error"]


LENGTHS = {
    "beyond the body": ("9999", 400),
    "negative": ("-1", 400),
    "huge": ("9" * 30, 400),
    "no number": ("x", 400),
    "longer than any number": ("9" * 5000, 400),
    "within the document": ("5", 500),
}


@pytest.mark.parametrize(("length", "status"), LENGTHS.values(), ids=LENGTHS.keys())
def test_header_lengths_that_lie(server, length, status):
    body = json.dumps(both(A)).encode()
    field = {"Inference-Header-Content-Length": length}
    assert server.request("POST", "/v2/models/add/infer", body, field)[0] == status


@pytest.mark.parametrize("sent", [0, 7, 9, 4096])
def test_binary_data_of_another_size_than_announced(server, sent):
    header = json.dumps({"inputs": [binary(8), entry("B", data=[1, 2])]}).encode()
    field = f"Inference-Header-Content-Length: {len(header)}"
    status, _, answer = post(server, "add", header + b"x" * sent, field)
    assert status == 400
    wanted = "unexpected size for input 'A'" if sent < 8 else "unexpected additional input data"
    assert wanted in json.loads(answer)["error"]


@pytest.mark.parametrize("size", [4, 12])
def test_binary_data_of_another_size_than_the_shapes(server, size):
    header = json.dumps({"inputs": [binary(size), entry("B", data=[1, 2])]}).encode()
    field = f"Inference-Header-Content-Length: {len(header)}"
    status, _, answer = post(server, "add", header + b"x" * size, field)
    assert status == 400
    assert f"Expected 8, got {size}" in json.loads(answer)["error"]


STRING_FAULTS = {
    "a length cut short": (struct.pack("<I", 1) + b"a" + b"\1\0", 2),
    "a string cut short": (struct.pack("<I", 5) + b"abc", 1),
    "a huge length": (struct.pack("<I", 0xFFFFFFFF) + b"abc", 1),
    "too few strings": (struct.pack("<I", 1) + b"a", 2),
    "too many strings": ((struct.pack("<I", 1) + b"a") * 3, 2),
    "none of many": (b"", 1_000_000),
    "bytes without a string": (b"abcd", 0),
}


@pytest.mark.parametrize(("data", "count"), STRING_FAULTS.values(), ids=STRING_FAULTS.keys())
def test_strings_whose_lengths_lie(server, data, count):
    field, body = binary_request([("IN", "BYTES", [count], data)])
    status, _, answer = post(server, "strings", body, field)
    assert status == 400
    assert "'IN'" in json.loads(answer)["error"]


def test_a_body_that_never_comes_whole(server):
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", b"{", length=100))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1000) == b""


def test_bytes_beyond_the_content_length_are_another_request(server):
    body = json.dumps(both(A)).encode()
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", body, length=len(body) - 5))
        assert read_head(sock)[0] == 500


def test_a_body_beyond_the_limit_is_refused_while_the_client_still_sends(server):
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", b"", length=100 * MIB))
        sock.sendall(b"x" * (20 * MIB))
        status, fields, answer = read_answer(sock)
        assert (status, fields["Connection"]) == (413, "close")
        assert "--http-max-input-size" in json.loads(answer)["error"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bombs_do_not_go_off(server, coding):
    packed = gzip.compress(b"\0" * (65 * MIB), 1)
    status, _, answer = server.request(
        "POST", "/v2/models/add/infer", packed, {"Content-Encoding": coding}
    )
    assert status == 400
    assert json.loads(answer)["error"]


def test_clients_that_leave_in_the_middle_of_a_body_leave_no_memory_behind(server):
    # Ten times what the arena has.
    for _ in range(1000):
        with connected(server.http_url) as sock:
            sock.sendall(inference("add", b"{", length=MIB))


@pytest.mark.parametrize("read", [0, 1000])
def test_clients_that_leave_before_their_answer_leave_no_memory_behind(server, read):
    request = fill(1, MIB)
    for _ in range(200):
        with connected(server.http_url, receive_bytes=4096) as sock:
            sock.sendall(request)
            sock.recv(read)


def test_clients_that_never_read_disturb_nobody_and_get_their_own_bytes(server):
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(server.http_url, 4096)) for _ in range(3)]
        for number, sock in enumerate(slow):
            sock.sendall(fill(100 + number, BIG))
        with connected(server.http_url) as sock:
            for value in range(20):
                sock.sendall(fill(value, BIG))
                answer = read_answer(sock)[2]
                assert answer[-4 * BIG :] == np.full(BIG, value, np.float32).tobytes()
        # What they are owed was not overwritten by the answers of others meanwhile.
        for number, sock in enumerate(slow):
            answer = read_answer(sock)[2]
            assert answer[-4 * BIG :] == np.full(BIG, 100 + number, np.float32).tobytes()


def test_the_server_stops_although_a_client_does_not_read(tmp_path):
    write_model(tmp_path, "fill", FILL, inputs='name: "IN" data_type: TYPE_INT64 dims: [2]')
    flags = "--exit-timeout-secs", "1"
    with running_server(tmp_path, *flags) as server, connected(server.http_url, 4096) as sock:
        sock.sendall(fill(7, BIG))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert server.stop() == 0
