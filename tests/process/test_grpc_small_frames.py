"""Clients whose frames are of 16 KiB, as most implementations send them, over a real socket."""

from __future__ import annotations

import socket
import struct

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.process.server import running_server, write_model

FRAME = 1 << 14
RECEIVE_BYTES = 24 * 1024

# Answers how many values came and what their sum is.
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = request.inputs()[0].as_numpy()
            told = np.array([values.size, values.astype(np.int64).sum()])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", told)]))
        return responses
"""

FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    write_model(
        repository,
        "sum",
        SUM,
        inputs='name: "IN" data_type: TYPE_INT32 dims: [-1]',
        outputs='name: "OUT" data_type: TYPE_INT64 dims: [2]',
    )
    with running_server(repository) as server:
        yield server


class Client:
    """A connection of the h2 library that sends bodies frame by frame, streams in turn."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=150)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.max_outbound_frame_size = FRAME
        self.h2.initiate_connection()
        self.bodies = {}
        self.answers = {}
        self.open = set()

    def __enter__(self):
        # What the server announces: its windows, above all.
        self.flush()
        self.receive()
        return self

    def __exit__(self, *exc):
        self.socket.close()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def receive(self):
        for event in self.h2.receive_data(self.socket.recv(1 << 16)):
            if isinstance(event, h2.events.DataReceived):
                self.answers[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                self.open.discard(event.stream_id)
            assert not isinstance(event, (h2.events.ConnectionTerminated, h2.events.StreamReset))
        self.flush()

    def begin(self, body):
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, FIELDS)
        self.bodies[stream_id] = memoryview(body)
        self.answers[stream_id] = b""
        self.open.add(stream_id)
        return stream_id

    def send_all(self):
        """Send all bodies, a frame of each in turn, and receive all answers."""
        while any(self.bodies.values()):
            stuck = True
            for stream_id, body in self.bodies.items():
                room = min(FRAME, self.h2.local_flow_control_window(stream_id), len(body))
                if room and len(body):
                    stuck = False
                    self.h2.send_data(stream_id, body[:room], end_stream=room == len(body))
                    self.bodies[stream_id] = body[room:]
            self.flush()
            if stuck:
                self.receive()
        while self.open:
            self.receive()

    def told(self, stream_id):
        answer = service_pb2.ModelInferResponse.FromString(self.answers[stream_id][5:])
        return tuple(np.frombuffer(answer.raw_output_contents[0], np.int64))


def message(values):
    request = service_pb2.ModelInferRequest(model_name="sum")
    request.inputs.add(name="IN", datatype="INT32", shape=[values.size])
    request.raw_input_contents.append(values.tobytes())
    body = request.SerializeToString()
    return struct.pack(">BI", 0, len(body)) + body


def copied(server):
    return server.metrics()['gpubridge_copied_bytes_total{kind="host",model="sum",version="1"}']


def values_of(count, seed):
    return np.random.default_rng(seed).integers(-(2**31), 2**31, count, np.int32)


def test_a_body_in_small_frames_is_received_where_the_model_reads_it(server):
    values = values_of(1_000_000, 1)
    with Client(server.grpc_url) as client:
        before = copied(server)
        stream_id = client.begin(message(values))
        client.send_all()
        assert client.told(stream_id) == (values.size, values.sum(dtype=np.int64))
        # What came together with something else, each time that the socket had no more.
        assert copied(server) - before < values.nbytes / 2 + RECEIVE_BYTES


def test_bodies_whose_frames_alternate_stay_apart(server):
    bodies = [values_of(300_000 + index, index) for index in range(4)]
    with Client(server.grpc_url) as client:
        streams = [client.begin(message(values)) for values in bodies]
        client.send_all()
        told = [client.told(stream_id) for stream_id in streams]
    assert told == [(values.size, values.sum(dtype=np.int64)) for values in bodies]
