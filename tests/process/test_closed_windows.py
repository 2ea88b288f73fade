"""gRPC clients that are there, and let no answer through: their calls end, and the memory is free."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest

from tests.process.raw_http import connected
from tests.process.raw_http2 import PING, frames, open_stream, send_data
from tests.process.server import running_server, wait_until, write_model

grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

LARGE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(3 << 19, np.float32))])
                for r in requests]
"""
ENDLESS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(int(request.inputs()[0].as_numpy()[0])):
                out = pb_utils.Tensor("OUT", np.ones(1 << 15, np.float32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
RST_STREAM = 3
NO_WINDOW = b"\0\0\6\4\0\0\0\0\0" + struct.pack(">HI", 4, 0)
ACKNOWLEDGED = b"\0\0\x08\6\1\0\0\0\0"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "large", LARGE)
    write_model(repository, "endless", ENDLESS, config="model_transaction_policy{decoupled:true}")
    # Outputs of 6 MiB, of which there is memory for one.
    flags = (
        "--grpc-send-timeout=2",
        "--grpc-keepalive-time=300",
        "--grpc-http2-max-pings-without-data=0",
        f"--output-arena-limit={8 << 20}",
    )
    with running_server(repository, *flags) as server:
        yield server


def message(model, value=1):
    tensor = triton.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.full(1, value, np.float32))
    return triton._utils._get_inference_request(
        model, [tensor], "", "", None, 0, False, False, 0, None, None
    )


def answered(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        tensor = triton.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        try:
            client.infer("large", [tensor])
        except triton.InferenceServerException as error:
            if "UNAVAILABLE" in error.status():
                return False
            raise
        return True


def test_a_client_that_only_answers_pings(server):
    with connected(server.grpc_url) as sock:
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
        wait_until(lambda: answered(server), "memory for an answer", server)


def test_a_stream_that_is_not_read(server):
    closing = threading.Event()

    def requests():
        # More than the client's windows let through, which it widens by itself: 500 MB.
        yield message("endless", 4000)
        closing.wait(150)

    with grpc.insecure_channel(server.grpc_url) as channel:
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
    assert answered(server)
    assert server.stubs()


def test_a_stream_that_waits_for_its_model_is_not_meant(server):
    with triton.InferenceServerClient(server.grpc_url) as client:
        answers = []
        client.start_stream(lambda result, error: answers.append((result, error)))
        tensor = triton.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.full(1, 40, np.float32))
        client.async_stream_infer("endless", [tensor], enable_empty_final_response=True)
        wait_until(lambda: len(answers) == 41, "all answers")
        assert [error for _, error in answers] == [None] * 41
