"""gRPC as clients of several kinds see it: tritonclient sync and asyncio, and plain grpcio."""

import queue
import threading

import numpy as np
import pytest

from tests.process.gates import Gate
from tests.process.model_sources import answering
from tests.process.server import (
    MUCH_MEMORY,
    running_server,
    wait_until,
    write_code_model,
    write_model,
)

grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")
from tritonclient.grpc import service_pb2  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

ECHO = answering(
    """
if value.size and value.flat[0] < 0:
    import fcntl
    fcntl.flock(open(os.path.dirname(__file__) + "/../../gate"), fcntl.LOCK_SH)
if value.size and value.flat[0] == 13:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen"))
return respond(OUT=value)
"""
)
STRINGS = ECHO.replace("value.flat[0]", "0")


@pytest.fixture(scope="module")
def server(repository):
    write_model(repository, "echo", ECHO)
    write_model(repository, "strings", STRINGS, tensors="IN STRING [-1] > OUT STRING [-1]")
    write_model(repository, "pair", ECHO, config="instance_group [{ count: 2 }]")
    write_code_model(repository, "m")
    with running_server(repository, *MUCH_MEMORY) as running:
        yield running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        yield client


def tensor(data, datatype="FP32"):
    return triton.InferInput("IN", list(data.shape), datatype).set_data_from_numpy(data)


@pytest.mark.parametrize("size", [0, 1, 16, 20_000, 3_000_000])
def test_tensors_of_all_sizes_come_back(client, size):
    data = np.arange(size, dtype=np.float32) % 1000 + 100
    result = client.infer("echo", [tensor(data)], request_id="x7")
    np.testing.assert_array_equal(result.as_numpy("OUT"), data)
    assert result.get_response().id == "x7"


def test_strings_come_back(client):
    data = np.array([b"", b"a", b"\xff\0", "ü".encode() * 50_000], np.object_)
    result = client.infer("strings", [tensor(data, "BYTES")])
    assert result.as_numpy("OUT").tolist() == data.tolist()


def test_large_tensors_are_not_copied_on_their_way_in(server, client):
    data = np.ones(4_000_000, np.float32)
    before = server.copied("echo")
    client.infer("echo", [tensor(data)])
    # What came together with something else; the model lets its input through.
    assert server.copied("echo") - before <= 0.01 * data.nbytes + (1 << 16)


@pytest.fixture
def gate(server):
    """The gate of the models that answer with their input."""
    gate = Gate(server.repositories[0] / "gate")
    yield gate
    gate.open()


def test_a_deadline_ends_the_call_and_nothing_else(server, client, gate):
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        client.infer("echo", [tensor(np.full(1, -1, np.float32))], client_timeout=0.2)
    gate.open()
    assert client.infer("echo", [tensor(np.ones(1, np.float32))]).as_numpy("OUT").tolist() == [1]


def test_a_cancelled_call_is_not_executed(server, client, gate):
    def cancelled():
        name = 'nv_inference_request_failure{model="echo",reason="CANCELED",version="1"}'
        return server.metrics()[name]

    wait_until(lambda: server.open_requests("echo") == 0, "the requests before to be over", server)

    before = cancelled()
    done = queue.Queue()
    blocker = client.async_infer(
        "echo", [tensor(np.full(1, -1, np.float32))], lambda result, error: done.put(error)
    )
    wait_until(lambda: server.open_requests("echo") == 1, "the first request to run", server)
    call = client.async_infer(
        "echo", [tensor(np.ones(1, np.float32))], lambda result, error: done.put(error)
    )
    wait_until(lambda: server.open_requests("echo") == 2, "both requests to have come", server)
    call.cancel()
    assert "Locally cancelled" in str(done.get(timeout=150))
    gate.open()
    assert done.get(timeout=150) is None
    wait_until(lambda: cancelled() == before + 1, "the request to be counted as cancelled", server)
    del blocker


def test_many_calls_at_once_get_their_own_answers(client):
    results = queue.Queue()
    for number in range(300):
        client.async_infer(
            "echo",
            [tensor(np.full(3, 100 + number, np.float32))],
            lambda result, error: results.put((result, error)),
            request_id=str(number),
        )
    for _ in range(300):
        result, error = results.get(timeout=150)
        assert error is None
        assert result.as_numpy("OUT").tolist() == [100.0 + int(result.get_response().id)] * 3


def test_a_stream_answers_in_order_and_survives_errors(client):
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    values = [1, 13, 3, 0.2, 5] * 20
    for number, value in enumerate(values):
        client.async_stream_infer(
            "echo", [tensor(np.full(1, value, np.float32))], request_id=str(number)
        )
    for number, value in enumerate(values):
        result, error = results.get(timeout=150)
        if value == 13:
            assert "thirteen" in error.message()
        else:
            assert result.get_response().id == str(number)
            assert result.as_numpy("OUT").tolist() == [np.float32(value)]
            assert result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_a_stream_keeps_its_order_where_a_later_request_is_done_first(server, client, gate):
    results = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    values = [-0.5, 1, 2, 3]
    for value in values:
        client.async_stream_infer("pair", [tensor(np.full(1, value, np.float32))])
    done = 'nv_inference_request_success{model="pair",version="1"}'
    wait_until(lambda: server.metrics()[done] == 3, "the later ones to be done", server)
    gate.open()
    answers = [results.get(timeout=150)[0].as_numpy("OUT").item() for _ in values]
    assert answers == values
    client.stop_stream()


def test_a_stream_whose_client_does_not_read_slows_only_itself(server):
    requests = 400
    data = tensor(np.ones(100_000, np.float32))
    message = triton._utils._get_inference_request(
        "echo", [data], "", "", None, 0, False, False, 0, None, None
    )
    sent = 0
    closing = threading.Event()

    def endless():
        nonlocal sent
        for _ in range(requests):
            if not sent % 16:
                # Those that wait for the model would fill the arena, too.
                wait_until(lambda: server.open_requests("echo") < 16, "the model", server)
            sent += 1
            yield message
        closing.wait(150)

    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        answers = stub(endless())
        first = next(answers)
        assert not first.error_message
        # No client reads on: others are answered as ever, in an arena of 64 MiB, until it sends no more.
        seen = still = 0
        with triton.InferenceServerClient(server.grpc_url) as client:
            while still < 20:
                client.infer("echo", [tensor(np.ones(10, np.float32))])
                still = still + 1 if sent == seen else 0
                seen = sent
        for _ in range(requests - 1):
            assert not next(answers).error_message
        closing.set()
    assert sent == requests


BAD_CALLS = {
    "unknown method": ("inference.GRPCInferenceService/Nope", b"", grpc.StatusCode.UNIMPLEMENTED),
    "unknown service": ("a.b/C", b"", grpc.StatusCode.UNIMPLEMENTED),
    "no message": (
        "inference.GRPCInferenceService/ModelInfer",
        b"\xff\xff",
        grpc.StatusCode.INTERNAL,
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_calls_that_cannot_be_answered(server, case):
    method, message, status = BAD_CALLS[case]
    with grpc.insecure_channel(server.grpc_url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{method}")(message)
        assert caught.value.code() == status
        health = channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert health == b"\x08\x01"


def test_a_client_that_vanishes_leaves_nothing(server, gate):
    with triton.InferenceServerClient(server.grpc_url) as client:
        for _ in range(5):
            client.async_infer(
                "echo", [tensor(np.full(1, -0.3, np.float32))], lambda result, error: None
            )
        wait_until(lambda: server.open_requests("echo") > 0, "a request to run", server)
    gate.open()
    wait_until(lambda: server.open_requests("echo") == 0, "the requests to be over", server)


def test_a_stub_that_dies_is_unavailable(client, server):
    code = triton.InferInput("IN", [1], "BYTES")
    code.set_data_from_numpy(np.array([b"os.kill(os.getpid(), 9)"], np.object_))
    with pytest.raises(
        InferenceServerException, match="Stub process 'm_0' is not healthy"
    ) as error:
        client.infer("m", [code])
    assert error.value.status() == "StatusCode.UNAVAILABLE"
    wait_until(lambda: client.is_model_ready("m"), "the model to be ready again", server)


def test_methods_that_are_no_inference_take_four_mebibytes(server):
    with grpc.insecure_channel(server.grpc_url, [("grpc.max_send_message_length", -1)]) as channel:
        for method, code in (
            ("ServerLive", grpc.StatusCode.RESOURCE_EXHAUSTED),
            ("ModelReady", grpc.StatusCode.RESOURCE_EXHAUSTED),
            # May bring a model's files; there is no model without a name.
            ("RepositoryModelLoad", grpc.StatusCode.NOT_FOUND),
        ):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"\x7a" + b"\x81\x80\x80\x02" + bytes((4 << 20) + 1), timeout=150)
            assert refused.value.code() == code
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"\x7a" + b"\x81\x80\xc0\x01" + bytes((3 << 20) + 1), timeout=150)
