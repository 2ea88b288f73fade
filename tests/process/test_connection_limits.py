"""Limits of connections at a real server: late, silent, too many, too old; and what goes on."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from tests.process.gates import Gate
from tests.process.raw_http import binary_request, connected, inference, read_answer, read_head
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

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())])
                for r in requests]
"""
SLOW = "time.sleep(2.5); self.said = 'done'"
CODE = json.dumps(
    {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [SLOW]}]}
).encode()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "echo", ECHO)
    write_code_model(repository, "m")
    return repository


@pytest.fixture(scope="module")
def strict(repository):
    """A server with short timeouts."""
    flags = (
        "--http-max-connections=8",
        "--http-header-timeout=0.4",
        "--http-body-timeout=0.4",
        "--http-idle-timeout=0.8",
        "--http-send-timeout=0.8",
        "--grpc-max-connections=8",
        "--grpc-preface-timeout=0.4",
        "--grpc-message-timeout=0.5",
        "--grpc-idle-timeout=0.8",
    )
    with running_server(repository, *flags) as server:
        before = sockets(server)
        yield server
        wait_until(lambda: sockets(server) <= before, "all connections to be gone", server)


def is_closed(sock) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def sockets(server) -> int:
    """Return the number of sockets that the server has open."""
    return sum(link.startswith("socket:") for link in open_files(server.pid))


def large_request() -> bytes:
    """A request whose answer no socket's buffer holds."""
    data = np.zeros(4 << 20, np.float32)
    field, body = binary_request([("IN", "FP32", data.shape, data.tobytes())])
    return inference("echo", body, field)


def infer(client, model="echo", data=None, **options):
    data = np.zeros(4, np.float32) if data is None else data
    tensor = triton.InferInput("IN", list(data.shape), "FP32")
    tensor.set_data_from_numpy(data)
    return client.infer(model, [tensor], **options).as_numpy("OUT")


def code(client, text):
    tensor = triton.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], np.object_))
    return client.infer("m", [tensor]).as_numpy("OUT")[0].decode()


# -- HTTP ----------------------------------------------------------------------------------------


def test_a_head_byte_by_byte(strict):
    with connected(strict.http_url) as sock:
        text = b"GET /v2 HTTP/1.1\r\nX-Slow: " + b"x" * 10_000
        status = None
        for at in range(len(text)):
            try:
                sock.sendall(text[at : at + 1])
            except ConnectionError:
                break
            sock.settimeout(0.01)
            try:
                status, fields, _ = read_head(sock)
                break
            except TimeoutError:
                continue
        assert status == 408
        assert fields["Connection"] == "close"


def test_a_body_that_does_not_come(strict):
    with connected(strict.http_url) as sock:
        sock.sendall(inference("echo", b"x" * 100, length=1_000_000))
        status, _, body = read_answer(sock)
        assert status == 408
        assert b"minimum 500 bytes/s" in body
    assert strict.request("GET", "/v2")[0] == 200


def test_an_idle_connection(strict):
    with connected(strict.http_url) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
        assert read_answer(sock)[0] == 200
        assert is_closed(sock)


def test_a_client_that_does_not_read(strict):
    before = sockets(strict)
    with connected(strict.http_url, receive_bytes=4096) as sock:
        sock.sendall(large_request())
        assert read_head(sock)[0] == 200
        wait_until(lambda: sockets(strict) > before, "the connection to be there")
        wait_until(lambda: sockets(strict) <= before, "the connection to be cut off")


def test_a_request_at_its_model_is_not_late(strict):
    with connected(strict.http_url) as sock:
        sock.sendall(inference("m", CODE))
        assert read_answer(sock)[0] == 200


def test_one_connection_too_many(strict, tmp_path):
    gate = Gate(tmp_path / "gate")
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "data": [gate.wait]}
    body = json.dumps({"inputs": [tensor]}).encode()
    pending = 'nv_inference_pending_request_count{model="m",version="1"}'
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(strict.http_url)) for _ in range(8)]
        for sock in busy:
            sock.sendall(inference("m", body))
        wait_until(lambda: strict.metrics()[pending] == 8, "the requests to be there", strict)
        sock = stack.enter_context(connected(strict.http_url))
        status, _, told = read_answer(sock)
        assert (status, b"--http-max-connections" in told) == (503, True)
        gate.open()
        assert [read_answer(sock)[0] for sock in busy] == [200] * 8
    wait_until(lambda: strict.request("GET", "/v2")[0] == 200, "a place for a new one")


def test_an_idle_connection_makes_room(strict):
    with ExitStack() as stack:
        socks = [stack.enter_context(connected(strict.http_url)) for _ in range(8)]
        for sock in (*socks[1:], socks[0]):
            sock.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
            assert read_answer(sock)[0] == 200
        new = stack.enter_context(connected(strict.http_url))
        new.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
        assert read_answer(new)[0] == 200
        assert is_closed(socks[1])


# -- gRPC ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beginning", [b"", PREFACE[:10], PREFACE[:24]])
def test_a_client_that_does_not_begin(strict, beginning):
    with connected(strict.grpc_url) as sock:
        sock.sendall(beginning)
        assert goaway(sock) == (4, b"expected the client preface and SETTINGS in time")


@pytest.mark.parametrize("elements", [100_000, 2_000_000])
def test_a_long_message_that_does_not_come(strict, elements):
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
    with triton.InferenceServerClient(strict.grpc_url) as client:
        assert infer(client).tolist() == [0] * 4
        before = sockets(strict)
        wait_until(lambda: sockets(strict) < before, "the connection to be closed")
        assert infer(client).tolist() == [0] * 4


def test_an_idle_client_that_does_not_leave(strict):
    with connected(strict.grpc_url) as sock:
        sock.sendall(PREFACE)
        assert kinds_until_cut_off(sock).count(GOAWAY) == 1


@pytest.fixture(scope="module")
def of_three(repository):
    with running_server(repository, "--grpc-max-connections=3") as server:
        yield server


@pytest.fixture
def small(of_three):
    """A server for three gRPC clients; those of a test are gone after it."""
    before = sockets(of_three)
    yield of_three
    wait_until(lambda: sockets(of_three) <= before, "all connections to be gone", of_three)


def answered(sock):
    """Wait until the server has taken all that was sent to it."""
    sock.sendall(bytes((0, 0, 8, PING, 0, 0, 0, 0, 0)) + b"anything")
    assert PING in (kind for kind, _ in frames(sock))


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


@pytest.fixture(scope="module")
def attentive(repository):
    """A server that asks for signs of life, limits the age of connections, and compresses."""
    flags = (
        "--grpc-keepalive-time=300",
        "--grpc-keepalive-timeout=300",
        "--grpc-http2-max-pings-without-data=0",
        "--grpc-infer-response-compression-level=high",
    )
    with running_server(repository, *flags) as server:
        yield server


def test_a_client_that_answers_no_ping_is_dead(attentive):
    with connected(attentive.grpc_url) as sock:
        open_stream(sock)
        assert PING in kinds_until_cut_off(sock)
    with connected(attentive.grpc_url) as sock:
        sock.sendall(PREFACE)
        # Without a call, no PING comes, and no time-out.
        sock.settimeout(1.5)
        kinds = []
        with pytest.raises(TimeoutError):
            kinds.extend(kind for kind, _ in frames(sock))
        assert PING not in kinds


def test_a_client_that_does_answer_stays(attentive):
    with triton.InferenceServerClient(attentive.grpc_url) as client:
        assert code(client, "time.sleep(1.5); self.said = 1") == "1"


def test_answers_are_compressed_for_those_who_accept_it(attentive):
    data = np.zeros(200_000, np.float32)
    with triton.InferenceServerClient(attentive.grpc_url) as client:
        np.testing.assert_array_equal(infer(client, data=data), data)
    with (
        tapped(attentive.grpc_url) as (url, seen),
        triton.InferenceServerClient(url) as client,
    ):
        np.testing.assert_array_equal(infer(client, data=data), data)
    assert sum(seen) < data.nbytes / 20


def test_streams_of_compressed_answers(attentive):
    # Workers compress some of them, and they come in their order even so.
    sizes = [50_000, 1, 300_000, 10, 2, 200_000]
    answers = []
    done = threading.Event()

    def answered(result, error):
        answers.append(error or result.as_numpy("OUT"))
        if len(answers) == len(sizes):
            done.set()

    with (
        tapped(attentive.grpc_url) as (url, seen),
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


def test_a_client_that_pings_too_often_is_told_so(attentive):
    with connected(attentive.grpc_url) as sock:
        open_stream(sock)
        ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"x" * 8
        for _ in range(6):
            sock.sendall(ping)
        assert goaway(sock) == (11, b"too_many_pings")


def test_old_connections_end_and_no_call_with_them(repository):
    flags = ("--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=60000")
    with (
        running_server(repository, *flags) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        # One that is longer than the connection may be old, ...
        assert code(client, "time.sleep(1.5); self.said = 'whole'") == "whole"
        # ... and many, over several connections.
        end = time.monotonic() + 2
        while time.monotonic() < end:
            assert infer(client).tolist() == [0] * 4


def test_grace_has_an_end(repository):
    flags = ("--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=300")
    with (
        running_server(repository, *flags) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        with pytest.raises(Exception, match="UNAVAILABLE"):
            code(client, "time.sleep(3); self.said = 'whole'")
        assert infer(client).tolist() == [0] * 4


# -- health --------------------------------------------------------------------------------------


def health(channel, method):
    kind = channel.unary_unary if method == "Check" else channel.unary_stream
    return kind(f"/grpc.health.v1.Health/{method}")


def test_health_is_watched(tmp_path):
    gate = Gate(tmp_path / "gate")
    write_code_model(tmp_path / "models", initialize=gate.wait)
    with (
        running_server(tmp_path / "models", ready=False) as server,
        grpc.insecure_channel(server.grpc_url) as channel,
    ):
        watch = health(channel, "Watch")(b"", timeout=150)
        assert next(watch) == b"\x08\x02"
        unknown = health(channel, "Watch")(b"\x0a\x05nobod")
        assert next(unknown) == b"\x08\x03"
        assert health(channel, "Check")(b"") == b"\x08\x02"
        gate.open()
        assert next(watch) == b"\x08\x01"
        unknown.cancel()
        assert server.stop() == 0
        assert next(watch) == b"\x08\x02"
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert ended.value.details() == "the server is stopping"


# -- the end -------------------------------------------------------------------------------------


def test_clients_who_do_not_read_do_not_hold_up_the_end(repository):
    with running_server(repository, "--exit-timeout-secs=60") as server, ExitStack() as stack:
        sock = stack.enter_context(connected(server.http_url, receive_bytes=4096))
        sock.sendall(large_request())
        half = stack.enter_context(connected(server.http_url))
        half.sendall(inference("echo", b"x", length=10_000))
        idle = stack.enter_context(connected(server.grpc_url))
        open_stream(idle)
        assert read_head(sock)[0] == 200
        # `stop` waits less than the time that the flag allows.
        assert server.stop() == 0
        assert read_answer(half)[0] == 503
