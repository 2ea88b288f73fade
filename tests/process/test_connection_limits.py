"""Limits of connections at a real server: late, silent, too many, too old; and what goes on."""

import json
import struct
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from tests.process.controlled import only
from tests.process.flag_sets import AGED
from tests.process.gates import Gate
from tests.process.model_sources import answering, sending
from tests.process.raw_http import (
    binary_request,
    connected,
    inference,
    is_held,
    read_answer,
    read_head,
)
from tests.process.raw_http2 import (
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    frames,
    goaway,
    kinds_until_cut_off,
    open_stream,
    send_data,
    tapped,
)
from tests.process.server import (
    open_files,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)

grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

ECHO = answering("return respond(OUT=value)")

LARGE = answering("return respond(OUT=np.ones(3 << 19, np.float32))")
ENDLESS = sending("for _ in range(int(value[0])): send(OUT=np.ones(1 << 15, np.float32))")
NO_WINDOW = b"\0\0\6\4\0\0\0\0\0" + struct.pack(">HI", 4, 0)
RST_STREAM = 3
ACKNOWLEDGED = b"\0\0\x08\6\1\0\0\0\0"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "echo", ECHO)
    write_code_model(repository, "m")
    write_model(repository, "large", LARGE)
    write_model(repository, "endless", ENDLESS, config="model_transaction_policy{decoupled:true}")
    return repository


@pytest.fixture(scope="module")
def strict_server(repository):
    """A server with short timeouts, which compresses over gRPC."""
    flags = (
        "--http-max-connections=8",
        "--http-body-timeout=0.4",
        "--http-send-timeout=0.8",
        "--grpc-max-connections=8",
        "--grpc-preface-timeout=0.4",
        "--grpc-message-timeout=0.5",
        "--grpc-idle-timeout=0.8",
        "--grpc-keepalive-time=1000",
        "--grpc-keepalive-timeout=300",
        "--grpc-infer-response-compression-level=high",
    )
    with running_server(repository, *flags, *only("echo", "m")) as server:
        yield server


@pytest.fixture
def strict(strict_server):
    """That server; the clients of a test are gone after it."""
    before = sockets(strict_server)
    yield strict_server
    wait_until(lambda: sockets(strict_server) <= before, "all connections to be gone")


def sockets(server) -> int:
    """Return the number of sockets that the server has open."""
    return sum(link.startswith("socket:") for link in open_files(server.pid))


def large_request() -> bytes:
    """A request whose answer no socket's buffer holds."""
    data = np.zeros(4 << 20, np.float32)
    field, body = binary_request([("IN", "FP32", data.shape, data.tobytes())])
    return inference("echo", body, field)


def infer(client, model="echo", data=None):
    data = np.zeros(4, np.float32) if data is None else data
    tensor = triton.InferInput("IN", list(data.shape), "FP32").set_data_from_numpy(data)
    return client.infer(model, [tensor]).as_numpy("OUT")


def code(client, text):
    tensor = triton.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
    return client.infer("m", [tensor]).as_numpy("OUT")[0].decode()


def test_a_body_that_does_not_come(strict):
    with connected(strict.http_url) as sock:
        sock.sendall(inference("echo", b"x" * 100, length=1_000_000))
        status, _, body = read_answer(sock)
        assert status == 408
        assert b"minimum 500 bytes/s" in body
    assert strict.request("GET", "/v2")[0] == 200


def test_a_client_that_does_not_read(strict):
    with connected(strict.http_url, receive_bytes=4096) as sock:
        sock.sendall(large_request())
        assert read_head(sock)[0] == 200
        wait_until(lambda: not is_held(sock), "the connection to be cut off", strict)


def test_one_connection_too_many(strict, tmp_path):
    gate = Gate(tmp_path / "gate")
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [gate.wait]}
    body = json.dumps({"inputs": [tensor]}).encode()
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(strict.http_url)) for _ in range(8)]
        for sock in busy:
            sock.sendall(inference("m", body))
        wait_until(lambda: strict.open_requests() == 8, "the requests to be there", strict)
        sock = stack.enter_context(connected(strict.http_url))
        status, _, told = read_answer(sock)
        assert (status, b"--http-max-connections" in told) == (503, True)
        gate.open()
        assert [read_answer(sock)[0] for sock in busy] == [200] * 8
    wait_until(lambda: strict.request("GET", "/v2")[0] == 200, "a place for a new one")


@pytest.mark.parametrize("beginning", [b"", PREFACE[:24]])
def test_a_client_that_does_not_begin(strict, beginning):
    with connected(strict.grpc_url) as sock:
        sock.sendall(beginning)
        assert goaway(sock) == (4, b"expected the client preface and SETTINGS in time")


def test_a_long_message_that_does_not_come(strict):
    elements = 100_000
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="IN", datatype="FP32", shape=[elements])
    request.raw_input_contents.append(bytes(4 * elements))
    message = request.SerializeToString()
    with connected(strict.grpc_url) as sock:
        open_stream(sock, b"ModelInfer")
        send_data(sock, b"\0" + len(message).to_bytes(4, "big") + message[:1000])
        # A little more comes, which is not enough.
        send_data(sock, b"\0")
        payload = next(payload for kind, payload in frames(sock) if kind == HEADERS)
        assert b"minimum 500 bytes/s" in payload


def test_an_idle_client_is_asked_to_leave_and_comes_again(strict):
    before = sockets(strict)
    with triton.InferenceServerClient(strict.grpc_url) as client:
        assert infer(client).tolist() == [0] * 4
        wait_until(lambda: sockets(strict) <= before, "the connection to be closed")
        assert infer(client).tolist() == [0] * 4


def test_an_idle_client_that_does_not_leave(strict):
    with connected(strict.grpc_url) as sock:
        sock.sendall(PREFACE)
        assert kinds_until_cut_off(sock).count(GOAWAY) == 1


def test_a_client_that_answers_no_ping_is_dead(strict):
    with connected(strict.grpc_url) as sock:
        open_stream(sock)
        assert PING in kinds_until_cut_off(sock)


def test_answers_are_compressed_for_those_who_accept_it(strict):
    data = np.zeros(200_000, np.float32)
    with triton.InferenceServerClient(strict.grpc_url) as client:
        np.testing.assert_array_equal(infer(client, data=data), data)
    with (
        tapped(strict.grpc_url) as (url, seen),
        triton.InferenceServerClient(url) as client,
    ):
        np.testing.assert_array_equal(infer(client, data=data), data)
    assert sum(seen) < data.nbytes / 20


def test_streams_of_compressed_answers(strict):
    # Workers compress some of them, and they come in their order even so.
    sizes = [50_000, 1, 300_000, 10, 2, 200_000]
    answers = []
    done = threading.Event()

    def answered(result, error):
        answers.append(error or result.as_numpy("OUT"))
        if len(answers) == len(sizes):
            done.set()

    with (
        tapped(strict.grpc_url) as (url, seen),
        triton.InferenceServerClient(url) as client,
    ):
        client.start_stream(answered)
        for size in sizes:
            tensor = triton.InferInput("IN", [size], "FP32")
            tensor.set_data_from_numpy(np.zeros(size, np.float32))
            client.async_stream_infer("echo", [tensor])
        assert done.wait(150)
        client.stop_stream()
    assert [answer.size for answer in answers] == sizes
    assert not any(answer.any() for answer in answers)
    assert sum(seen) < 4 * sum(sizes) / 20


def test_a_client_that_pings_too_often_is_told_so(strict):
    with connected(strict.grpc_url) as sock:
        open_stream(sock)
        ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"x" * 8
        # At once: one that comes after the end would reset the connection, and what was said with it.
        sock.sendall(6 * ping)
        assert goaway(sock) == (11, b"too_many_pings")


def test_old_connections_end_and_no_call_with_them_within_their_grace(repository, tmp_path):
    gate = Gate(tmp_path / "gate")
    with (
        running_server(repository, *AGED, *only("m")) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        # One that is longer than the connection may be old, ...
        assert code(client, "time.sleep(1); self.said = 'whole'") == "whole"
        # ... and many, over several connections.
        for _ in range(20):
            assert code(client, "time.sleep(0.05); self.said = 'whole'") == "whole"
        with pytest.raises(Exception, match="UNAVAILABLE"):
            code(client, gate.wait)
        gate.open()
        assert code(client, "self.said = 'whole'") == "whole"


@pytest.fixture(scope="module")
def patient(repository):
    """A server for three gRPC clients, which asks them for signs of life, with memory for one output of 6 MiB."""
    flags = (
        "--grpc-max-connections=3",
        "--grpc-send-timeout=2",
        "--grpc-keepalive-time=300",
        "--grpc-http2-max-pings-without-data=0",
        f"--output-arena-limit={8 << 20}",
    )
    with running_server(repository, *flags, *only("echo", "large", "endless")) as running:
        yield running


@pytest.fixture
def small(patient):
    """That server; the clients of a test are gone after it."""
    before = sockets(patient)
    yield patient
    wait_until(lambda: sockets(patient) <= before, "all connections to be gone", patient)


def answered(sock):
    """Wait until the server has taken all that was sent to it."""
    sock.sendall(bytes((0, 0, 8, PING, 0, 0, 0, 0, 0)) + b"anything")
    assert (PING, b"anything") in frames(sock)


def test_one_grpc_connection_too_many(small):
    with ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(connected(small.grpc_url))
            open_stream(sock)
            answered(sock)
        number, text = goaway(stack.enter_context(connected(small.grpc_url)))
        assert (number, b"--grpc-max-connections" in text) == (11, True)


def test_the_connection_that_is_idle_for_the_longest_time_goes_for_a_new_one(small):
    with ExitStack() as stack:
        busy, first, second = (stack.enter_context(connected(small.grpc_url)) for _ in range(3))
        open_stream(busy)
        for sock in (busy, first, second):
            if sock is not busy:
                sock.sendall(PREFACE)
            answered(sock)
        answered(first)
        with triton.InferenceServerClient(small.grpc_url) as client:
            assert infer(client).tolist() == [0] * 4
        assert goaway(second) == (0, b"")
        answered(busy)
        answered(first)


def message(model, value=1):
    tensor = triton.InferInput("IN", [1], "FP32").set_data_from_numpy(np.full(1, value, np.float32))
    return triton._utils._get_inference_request(
        model, [tensor], "", "", None, 0, False, False, 0, None, None
    )


def has_memory(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        try:
            infer(client, "large", np.ones(1, np.float32))
        except triton.InferenceServerException as error:
            if "UNAVAILABLE" in error.status():
                return False
            raise
        return True


def test_a_client_that_only_answers_pings(small):
    with connected(small.grpc_url) as sock:
        open_stream(sock, b"ModelInfer")
        sock.sendall(NO_WINDOW)
        data = message("large").SerializeToString()
        send_data(sock, b"\0" + struct.pack(">I", len(data)) + data)
        # END_STREAM.
        sock.sendall(b"\0\0\0\0\1\0\0\0\1")
        pings = 0
        for kind, payload in frames(sock):
            if kind == PING:
                pings += 1
                sock.sendall(ACKNOWLEDGED + payload)
            if kind == RST_STREAM:
                break
        assert pings
        assert (kind, payload) == (RST_STREAM, struct.pack(">I", 11))
        # What it held is others' again.
        wait_until(lambda: has_memory(small), "memory for an answer", small)


def test_a_stream_that_is_not_read(small):
    closing = threading.Event()

    def requests():
        # More than the client's windows let through, which it widens by itself: 500 MB.
        yield message("endless", 4000)
        closing.wait(150)

    with grpc.insecure_channel(small.grpc_url) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )(requests())
        assert not next(call).error_message
        ended = threading.Event()
        call.add_callback(ended.set)
        assert ended.wait(150)
        closing.set()
        assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert has_memory(small)
    assert small.stubs()


def test_a_stream_that_waits_for_its_model_is_not_meant(small):
    with triton.InferenceServerClient(small.grpc_url) as client:
        answers = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        tensor = triton.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.full(1, 40, np.float32))
        client.async_stream_infer("endless", [tensor], enable_empty_final_response=True)
        wait_until(lambda: len(answers) == 41, "all answers")
        assert [error for _, error in answers] == [None] * 41
