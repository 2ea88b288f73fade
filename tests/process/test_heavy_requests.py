"""Requests that take long to parse or to format: right answers, and others are served meanwhile."""

import base64
import http.client
import json
import threading

import numpy as np
import pytest

from tests.process.model_sources import answering, sending
from tests.process.raw_http import connected, inference, read_answers
from tests.process.server import running_server, write_model

grpc = pytest.importorskip("grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")
service_pb2_grpc = pytest.importorskip("tritonclient.grpc.service_pb2_grpc")

ECHO = answering("return respond(OUT=value)")
TOLD = answering(
    """
text = json.loads(request.parameters())["text"]
return respond(OUT=np.array([f"{len(text)} {text[:3]}{text[-3:]}".encode()], object))
"""
)
EVENTS = sending("for count in value.tolist(): send(OUT=np.arange(int(count), dtype=np.float64))")
LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
ATTEMPTS = 5
LEAST_ANSWERS = 20
"""A neighbour gets more than that while a request of seconds is worked on; it got one to three."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("heavy")
    for model, kind in (("numbers", "FP64"), ("strings", "STRING"), ("small", "FP32")):
        write_model(repository, model, ECHO, tensors=f"IN {kind} [-1] > OUT {kind} [-1]")
    write_model(repository, "told", TOLD, tensors="IN FP32 [-1] > OUT STRING [-1]")
    write_model(
        repository,
        "events",
        EVENTS,
        config="model_transaction_policy { decoupled: true }",
        tensors="> OUT FP64 [-1]",
    )
    flags = "--model-control-mode=explicit", "--load-model=*"
    with running_server(repository, *flags) as server:
        yield server


def document(datatype, shape, data):
    tensor = {"name": "IN", "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"id": "one", "inputs": [tensor]}, separators=(",", ":")).encode()


def infer(server, model, body):
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, json.loads(answer)


def beside(server, ask):
    """Return what is answered while a neighbour gets many answers: where the machine leaves it none, ask again.

    ``ask`` is called with the neighbour, and returns an answer, and the number of its answers until then.
    """
    for _ in range(ATTEMPTS):
        with Neighbour(server) as neighbour:
            answer, answers = ask(neighbour)
        if answers > LEAST_ANSWERS:
            return answer
    return pytest.fail(f"a neighbour got {answers} answers at most")


def infer_beside(server, model, body):
    """Return the answer; a neighbour got many between the last byte sent and the first back."""

    def ask(neighbour):
        connection = http.client.HTTPConnection(server.http_url, timeout=150)
        connection.request("POST", f"/v2/models/{model}/infer", body)
        before = neighbour.answers
        response = connection.getresponse()
        meanwhile = neighbour.answers - before
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        return answer, meanwhile

    return beside(server, ask)


class Neighbour:
    """Asks for something small again and again, while the block runs; counts right answers."""

    def __init__(self, server):
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = 0

    def _ask(self):
        connection = http.client.HTTPConnection(self._server.http_url, timeout=150)
        body = document("FP32", [2], [1, 2.5])
        # Fewer a second say as much.
        while not self._over.wait(0.001):
            connection.request("POST", "/v2/models/small/infer", body)
            answer = json.loads(connection.getresponse().read())
            assert answer["outputs"][0]["data"] == [1.0, 2.5]
            self.answers += 1
        connection.close()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def test_others_are_served_beside_many_numbers(server):
    values = np.random.default_rng(1).normal(size=350_000)
    body = document("FP64", [values.size], values.tolist())
    answer = infer_beside(server, "numbers", body)
    assert answer["id"] == "one"
    assert answer["outputs"][0]["data"] == values.tolist()


def test_others_are_served_beside_many_strings(server):
    values = [f"é{i}" for i in range(300_000)]
    body = document("BYTES", [len(values)], values)
    answer = infer_beside(server, "strings", body)
    assert answer["outputs"][0]["data"] == values


@pytest.mark.parametrize(
    ("data", "count", "text"),
    [
        ("1," * 200_000 + "true", 200_001, "non-number as double"),
        ("1," * 200_000 + "1", 5, "Shape does not match true shape of 'data' field"),
        ("1," * 200_000 + "1]", 200_001, "failed to parse the request JSON buffer"),
    ],
)
def test_a_large_wrong_request_gets_its_error(server, data, count, text):
    body = b'{"inputs":[{"name":"IN","datatype":"FP64","shape":[%d],"data":[%b]}]}'
    status, answer = infer(server, "numbers", body % (count, data.encode()))
    assert status in (400, 500)
    assert text in answer["error"]


def test_a_large_request_whose_client_is_gone_leaves_nothing(server):
    body = document("FP64", [1_000_000], np.ones(1_000_000).tolist())
    for _ in range(5):
        connection = http.client.HTTPConnection(server.http_url, timeout=150)
        connection.request("POST", "/v2/models/numbers/infer", body)
        connection.close()
    # The arena would be full of bodies after as many as these.
    for _ in range(3):
        assert server.request("POST", "/v2/models/numbers/infer", body)[0] == 200
    assert "Traceback" not in server.log()


def test_answers_of_large_and_small_requests_keep_their_order(server):
    large = document("FP64", [200_000], np.arange(200_000).tolist())
    small = document("FP32", [1], [7])
    with connected(server.http_url) as sock:
        sock.sendall(inference("numbers", large) + inference("small", small))
        answers = [json.loads(body) for _, body in read_answers(sock, 2)]
    assert [len(answer["outputs"][0]["data"]) for answer in answers] == [200_000, 1]


def test_a_large_generate_request_is_answered_beside_others(server):
    values = np.arange(150_000, dtype=float).tolist()
    body = json.dumps({"IN": values}).encode()
    with Neighbour(server) as neighbour:
        status, _, answer = server.request("POST", "/v2/models/numbers/generate", body)
    assert status == 200
    assert json.loads(answer)["OUT"] == values
    assert neighbour.answers
    text = "é\n" * 300_000
    status, _, answer = server.request(
        "POST", "/v2/models/strings/generate", json.dumps({"IN": text})
    )
    assert status == 200
    assert json.loads(answer)["OUT"] == text


def test_large_and_small_events_keep_their_order(server):
    counts = [2, 300_000, 3, 200_000, 200_000, 4]
    with Neighbour(server) as neighbour:
        status, _, body = server.request(
            "POST", "/v2/models/events/generate_stream", json.dumps({"IN": counts})
        )
    assert status == 200
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]
    assert [event["OUT"] for event in events] == [list(range(count)) for count in counts]
    assert neighbour.answers


def test_classes_of_many_values_over_a_grpc_stream(server):
    values = np.random.default_rng(1).permutation(800_000).astype(float)
    request = service_pb2.ModelInferRequest(model_name="numbers", id="one")
    request.inputs.add(name="IN", datatype="FP64", shape=[values.size])
    request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name="OUT").parameters["classification"].int64_param = 40_000
    order = np.argsort(-values)
    for answer in messages(server, request, request, streamed=True):
        assert answer.outputs[0].shape == [40_000]
        first, second = (f"{values[i]:f}:{i}".encode() for i in order[:2])
        encoded = answer.raw_output_contents[0]
        assert encoded.startswith(len(first).to_bytes(4, "little") + first)
        assert encoded[4 + len(first) :].startswith(len(second).to_bytes(4, "little") + second)


def messages(server, *requests, streamed=False):
    """Send ModelInferRequests over gRPC while a neighbour is served; returns the answers."""

    def ask(neighbour):
        before = neighbour.answers
        if streamed:
            answers = [each.infer_response for each in stub.ModelStreamInfer(iter(requests))]
        else:
            answers = [stub.ModelInfer(request) for request in requests]
        return answers, neighbour.answers - before

    with grpc.insecure_channel(server.grpc_url, LIMITS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return beside(server, ask)


def test_long_parameters_over_http_reach_the_model(server):
    text = 'é"\\\n' * 1_500_000
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
    body = {"inputs": [tensor], "parameters": {"text": text, "number": 1}}
    answer = infer_beside(server, "told", json.dumps(body, ensure_ascii=False).encode())
    told = f"{len(text)} {text[:3]}{text[-3:]}"
    assert answer["outputs"][0]["data"] == [told]


def test_others_are_served_beside_long_loads(server):
    data = np.random.default_rng(1).bytes(2_000_000)
    tensors = [{"name": f"IN{i}", "data_type": "TYPE_FP32", "dims": [1] * 99} for i in range(1500)]
    parameters = {
        "config": json.dumps({"backend": "python", "input": tensors}, separators=(",", ":")),
        "file:1/model.py": base64.b64encode(ECHO.encode()).decode(),
        "file:1/data": base64.b64encode(data).decode(),
    }
    body = json.dumps({"parameters": parameters})

    def load(neighbour):
        return server.request("POST", "/v2/repository/models/loaded/load", body), neighbour.answers

    assert beside(server, load)[0] == 200
    _, _, config = server.request("GET", "/v2/models/loaded/config")
    assert [tensor["name"] for tensor in json.loads(config)["input"]] == [
        tensor["name"] for tensor in tensors
    ]


def test_long_parameters_over_grpc_reach_the_model(server):
    text = 'é"\\\n' * 600_000
    request = service_pb2.ModelInferRequest(model_name="told", id="one")
    request.inputs.add(name="IN", datatype="FP32", shape=[1])
    request.raw_input_contents.append(bytes(4))
    request.parameters["text"].string_param = text
    request.parameters["number"].int64_param = 1
    answers = messages(server, request, request)
    assert [answer.id for answer in answers] == ["one", "one"]
    told = f"{len(text)} {text[:3]}{text[-3:]}".encode()
    for answer in answers:
        assert answer.raw_output_contents[0][4:] == told


def test_many_typed_values_over_grpc(server):
    values = np.random.default_rng(1).normal(size=1_800_000)
    numbers = service_pb2.ModelInferRequest(model_name="numbers")
    tensor = numbers.inputs.add(name="IN", datatype="FP64", shape=[values.size])
    tensor.contents.fp64_contents.extend(values)
    words = [f"é{i}".encode() for i in range(100_000)]
    strings = service_pb2.ModelInferRequest(model_name="strings")
    tensor = strings.inputs.add(name="IN", datatype="BYTES", shape=[len(words)])
    tensor.contents.bytes_contents.extend(words)
    first, second = messages(server, numbers, strings)
    assert first.raw_output_contents[0] == values.tobytes()
    expected = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    assert second.raw_output_contents[0] == expected
