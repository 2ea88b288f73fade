"""Requests that are wrong: each gets the reason, and others do not notice.

After every test the server must answer a good request; at the end it must hold nothing that it did
not hold before.
"""

from __future__ import annotations

import json
import struct

import pytest

from tests.process.raw_http import binary_request, connected, inference, read_head
from tests.process.tried_server import good, post, tried_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tried_server(tmp_path_factory.mktemp("models")) as server:
        yield server


@pytest.fixture(autouse=True)
def good_before_and_after(server):
    yield
    good(server)


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
    ("POST", "/v2/models/%62dd/infer", 404),
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


def test_bytes_beyond_the_content_length_are_another_request(server):
    body = json.dumps(both(A)).encode()
    with connected(server.http_url) as sock:
        sock.sendall(inference("add", body, length=len(body) - 5))
        assert read_head(sock)[0] == 500
