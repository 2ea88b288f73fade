"""Copies of tensor bytes by the bridge, read from its own counters: the budgets of the design."""

import json

import numpy as np
import pytest

from tests.process.model_sources import answering
from tests.process.raw_http import binary_request, connected, inference, read_answer, read_head
from tests.process.server import running_server, write_model

RECEIVE_BYTES = 16 * 1024
LARGE = 1 << 20

# Answers nothing but where its inputs lie and what is in them.
SINK = answering(
    """
other = request.inputs()[1].as_numpy()
told = [value.ctypes.data % 64, other.ctypes.data % 4, int(value.sum()), int(other.sum())]
return respond(OUT=np.array(told, np.int64))
"""
)
TOLD_BYTES = 4 * 8
# Answers the number of bytes of its one string, and their sum.
READER = answering(
    """
(text,) = value
return respond(OUT=np.array([len(text), int(np.frombuffer(text, np.uint8).sum())], np.int64))
"""
)


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "echo", answering("return respond(OUT=value)"))
    threes = answering("return respond(OUT=np.full(int(value[0]), 3, np.float32))")
    write_model(repository, "source", threes, tensors="IN INT64 [1]")
    write_model(repository, "sink", SINK, tensors="A UINT8 [-1]; B FP32 [-1] > OUT INT64 [4]")
    write_model(repository, "reader", READER, tensors="IN STRING [1] > OUT INT64 [2]")
    with running_server(repository) as server:
        yield server


class Copies:
    """Bytes copied for a model since this object was made."""

    def __init__(self, server, model):
        self._server = server
        self._labels = f'{{kind="host",model="{model}",version="1"}}'
        self._before = self._read()

    def _read(self):
        page = self._server.metrics()
        names = "gpubridge_copied_bytes_total", "gpubridge_copies_total"
        return [page[name + self._labels] for name in names]

    @property
    def nbytes(self):
        return self._read()[0] - self._before[0]

    @property
    def count(self):
        return self._read()[1] - self._before[1]


def infer(server, model, field, body, *, apart=True):
    """Send head and body apart (the body only when the server has read the head) or together."""
    with connected(server.http_url) as sock:
        if apart:
            sock.sendall(inference(model, b"", field, "Expect: 100-continue", length=len(body)))
            assert read_head(sock)[0] == 100
            sock.sendall(body)
        else:
            sock.sendall(inference(model, body, field))
        status, fields, answer = read_answer(sock)
    assert status == 200, answer
    return answer[int(fields["Inference-Header-Content-Length"]) :]


def sink(server, a, b, **how):
    field, body = binary_request(
        [("A", "UINT8", [a.size], a.tobytes()), ("B", "FP32", [b.size], b.tobytes())]
    )
    at_a, at_b, sum_a, sum_b = np.frombuffer(infer(server, "sink", field, body, **how), np.int64)
    # Whatever way they came, the first tensor lies at a multiple of 64, all at one of their size.
    assert (at_a, at_b) == (0, 0)
    assert (sum_a, sum_b) == (a.sum(), b.sum())


def test_a_large_body_is_received_where_the_model_reads_it(server):
    copies = Copies(server, "sink")
    sink(server, np.ones(LARGE, np.uint8), np.ones(LARGE, np.float32))
    assert copies.nbytes == TOLD_BYTES
    assert copies.count == 1


def test_of_a_large_body_that_comes_with_its_head_at_most_a_buffer_is_copied(server):
    copies = Copies(server, "sink")
    sink(server, np.ones(LARGE, np.uint8), np.ones(LARGE, np.float32), apart=False)
    assert copies.nbytes <= TOLD_BYTES + RECEIVE_BYTES


def test_a_small_body_is_copied_once(server):
    copies = Copies(server, "sink")
    sink(server, np.ones(40, np.uint8), np.ones(50, np.float32), apart=False)
    assert copies.nbytes == 40 + 4 * 50 + TOLD_BYTES


@pytest.mark.parametrize("nbytes", [LARGE, 5, 0])
def test_a_body_that_is_a_string_is_received_where_the_model_reads_it(server, nbytes):
    copies = Copies(server, "reader")
    body = np.arange(nbytes, dtype=np.uint8)
    field = "Inference-Header-Content-Length: 0"
    told = infer(server, "reader", field, body.tobytes(), apart=nbytes > 0)
    assert np.frombuffer(told, np.int64).tolist() == [nbytes, body.sum()]
    # Of an empty one, only its length is put in place.
    assert copies.nbytes == 2 * 8 + (0 if nbytes else 4)


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_a_later_tensor_at_an_odd_place_is_moved_once(server, odd):
    copies = Copies(server, "sink")
    values = np.arange(10_000, dtype=np.float32)
    sink(server, np.ones(LARGE + odd, np.uint8), values)
    assert copies.nbytes == values.nbytes + TOLD_BYTES
    assert copies.count == 2


@pytest.mark.parametrize("count", [1, 1000, LARGE])
def test_an_answer_is_copied_once_into_the_arena_and_sent_from_there(server, count):
    copies = Copies(server, "source")
    field, body = binary_request([("IN", "INT64", [1], np.array([count]).tobytes())])
    answer = infer(server, "source", field, body)
    assert answer == np.full(count, 3, np.float32).tobytes()
    assert copies.nbytes == 4 * count
    assert copies.count == 1


def test_a_passed_through_input_is_not_copied(server):
    values = np.arange(LARGE, dtype=np.float32)
    copies = Copies(server, "echo")
    field, body = binary_request([("IN", "FP32", [LARGE], values.tobytes())])
    assert infer(server, "echo", field, body) == values.tobytes()
    assert copies.nbytes == 0


def test_json_values_are_copied_into_the_arena_once(server):
    copies = Copies(server, "echo")
    given = {"name": "IN", "datatype": "FP32", "shape": [100], "data": [1.5] * 100}
    body = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    infer(server, "echo", f"Inference-Header-Content-Length: {len(body)}", body)
    assert copies.nbytes == 400 + 400


def test_binary_inputs_beside_json_values_are_copied_once_more(server):
    copies = Copies(server, "sink")
    binary = np.ones(LARGE, np.float32)
    values = {"name": "A", "datatype": "UINT8", "shape": [2], "data": [1, 2]}
    size = {"binary_data_size": binary.nbytes}
    beside = {"name": "B", "datatype": "FP32", "shape": [LARGE], "parameters": size}
    document = {"inputs": [values, beside], "parameters": {"binary_data_output": True}}
    header = json.dumps(document).encode()
    field = f"Inference-Header-Content-Length: {len(header)}"
    infer(server, "sink", field, header + binary.tobytes())
    assert copies.nbytes == 2 + binary.nbytes + TOLD_BYTES
    small = Copies(server, "sink")
    header = header.replace(str(LARGE).encode(), b"1").replace(str(binary.nbytes).encode(), b"4")
    field = f"Inference-Header-Content-Length: {len(header)}"
    infer(server, "sink", field, header + binary[:1].tobytes(), apart=False)
    assert small.nbytes == 4 + (2 + 4) + TOLD_BYTES
