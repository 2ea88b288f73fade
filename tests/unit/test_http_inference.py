"""Plain inference requests over HTTP: taken and answered without Python, or handed to it whole."""

import sys
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from gpubridge.config import HttpConnections
from gpubridge.dataplane import InferTargets, TraceSampling
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.http.connection import HttpConnection, HttpListener
from gpubridge.frontend.http.message import HttpSettings
from gpubridge.frontend.infer import InferEndpoint
from gpubridge.frontend.shared_memory import RequestMemory
from gpubridge.protocol.status import error_body, http_status
from gpubridge.request import InferResponse
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.unit.http_endpoint import Transport, parse_answers, post
from tests.unit.model_configs import model_config

CONFIG = model_config("A FP32 [-1]", "OUT FP32 [-1]")
OUT = Signature((TensorSpec("OUT", "FP32", 1, 4),), ())
WORKERS = Workers()
PACKAGES = ("gpubridge.frontend", "gpubridge.protocol", "gpubridge.host_shm")


class Model:
    """Keeps requests until the test lets it answer them with their input."""

    name = "m"

    def __init__(self, arena, version=1, config=CONFIG):
        self.arena = arena
        self.config = config
        self.version = version
        self.statistics = ModelStatistics("m", version)
        self.traces = SimpleNamespace(sampling=TraceSampling())
        self.sampling = self.traces.sampling
        self.waiting = []
        self.origins = []
        self.refusal = None

    def submit(self, request, origin=None):
        if self.refusal is not None:
            self.take(request)
            raise self.refusal
        self.origins.append(origin)
        request.cancelled = self.cancel
        self.waiting.append(request)

    def cancel(self, request):
        self.waiting.remove(request)
        self.take(request)

    def take(self, request):
        """Take the memory of a request; returns its input."""
        slot, request.slot = request.slot, None
        at, nbytes = request.places[0]
        data = bytes(slot.memory[request.start + at : request.start + at + nbytes])
        self.arena.free(slot)
        return data

    def answer(self, index=0, signature=OUT, shapes=None, **fields):
        request = self.waiting.pop(index)
        data = self.take(request)
        shapes = shapes or ((len(data) // 4,),)
        request.finish(InferResponse(signature, shapes, [memoryview(data)], **fields))


class Server:
    """One endpoint, and a connection to it."""

    def __init__(self, limit=1 << 24):
        self.regions = Regions(limit)
        self.arena = self.regions.arena("m")
        self.model = Model(self.arena)
        registry = ClientRegions(self.regions, DeviceManager(0), allowed=True, most=4)
        memory = RequestMemory(self.regions, registry)
        self.endpoint = self.endpoint_of(memory)
        self.route = self.endpoint.request
        targets = InferTargets()
        targets.add(b"/infer", self.endpoint)
        settings = HttpSettings(1 << 20, HttpConnections())
        listener = HttpListener(self, settings, WORKERS, self.regions.budget, targets)
        self.connection = HttpConnection(listener, set())
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    def endpoint_of(self, memory):
        return InferEndpoint(self.model, memory, WORKERS)

    def failure(self, error, status, _):
        return status or http_status(error.code), error_body(error)

    def receive(self, *pieces):
        for piece in pieces:
            sent = 0
            while sent < len(piece):
                buffer = memoryview(self.connection.get_buffer(-1))
                taken = min(len(buffer), len(piece) - sent)
                buffer[:taken] = piece[sent : sent + taken]
                sent += taken
                self.connection.buffer_updated(taken)

    def answers(self):
        """Status, header and output of each answer."""
        found = []
        for status, fields, body in parse_answers(bytes(self.transport.sent)):
            header = int(fields.get(b"Inference-Header-Content-Length", len(body)))
            found.append((status, orjson.loads(body[:header]), body[header:]))
        return found

    @property
    def lent(self):
        return self.arena.lent()[0]


@pytest.fixture
def server():
    """A server that knows requests with one input and an id."""
    server = Server()
    for identifier in ("first", "second"):
        server.receive(infer(b"abcd", identifier))
        server.model.answer()
    server.transport.sent.clear()
    yield server
    server.connection.connection_lost(None)
    assert server.lent == 0
    server.regions.close()


def infer(data, identifier, *fields, **members):
    entry = {"name": "A", "datatype": "FP32", "shape": [len(data) // 4]}
    entry["parameters"] = {"binary_data_size": len(data)}
    document = {"id": identifier, "inputs": [entry], **members}
    document.setdefault("parameters", {"binary_data_output": True})
    header = orjson.dumps(document)
    length = b"Inference-Header-Content-Length: %d" % len(header)
    return post(header + data, b"/infer", length, *fields)


def header_of(identifier, size, version="1"):
    return {
        "id": identifier,
        "model_name": "m",
        "model_version": version,
        "outputs": [
            {
                "name": "OUT",
                "datatype": "FP32",
                "shape": [size // 4],
                "parameters": {"binary_data_size": size},
            }
        ],
    }


def test_pages_of_other_origins_are_refused_before_the_plane_takes_them(server):
    server.receive(infer(b"abcd", "page", b"Origin: http://evil.example"))
    server.receive(infer(b"abcd", "page", b"Sec-Fetch-Site: cross-site"))
    assert [status for status, *_ in parse_answers(bytes(server.transport.sent))] == [403, 403]
    assert not server.model.waiting


def ask(server, requests):
    """Send requests and answer each; returns the functions of the frontend that were called."""
    called = []

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(PACKAGES):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        for request in requests:
            server.receive(request)
            server.model.answer()
    finally:
        sys.setprofile(None)
    return called


def test_a_known_form_of_request_calls_nothing_of_the_frontend(server):
    called = ask(server, [infer(bytes([i]) * 4 * i, f"id {i}") for i in range(1, 9)])
    assert server.answers() == [
        (200, header_of(f"id {i}", 4 * i), bytes([i]) * 4 * i) for i in range(1, 9)
    ]
    assert not called


def infer_json(values, identifier="x"):
    entry = {"name": "A", "datatype": "FP32", "shape": [len(values)], "data": values}
    return post(orjson.dumps({"id": identifier, "inputs": [entry]}), b"/infer")


def json_output(datatype, values):
    return {"name": "OUT", "datatype": datatype, "shape": [len(values)], "data": values}


def test_neither_does_one_with_json_values_in_and_out(server):
    assert "parse" in ask(server, [infer_json([1.5]), infer_json([2.5])])
    values = [[0.5 * i] * i for i in range(1, 9)]
    called = ask(server, [infer_json(each, f"id {i}") for i, each in enumerate(values)])
    assert [(head["id"], head["outputs"]) for _, head, _ in server.answers()[2:]] == [
        (f"id {i}", [json_output("FP32", each)]) for i, each in enumerate(values)
    ]
    assert not called


CLIENTS = {
    "curl": [b"Accept: */*", b"Content-Type: application/x-www-form-urlencoded"],
    "fetch": [
        b"content-type: text/plain;charset=UTF-8",
        b"accept-language: *",
        b"sec-fetch-mode: cors",
        b"accept-encoding: gzip, deflate",
    ],
    "requests": [b"Accept-Encoding: gzip, deflate, br", b"Content-Type: application/json"],
    "kserve": [b"Accept-Encoding: gzip, deflate", b"content-type: application/json"],
    "tritonclient": [b"User-Agent: python/gevent-http-client-2.6.1"],
}
SPELLINGS = {
    "kserve": '{"id":"%s","model_name":"m","inputs":[{"name":"A","shape":[2],"datatype":"FP32",'
    '"data":[0.10000000149011612,2.0]}],"outputs":[{"name":"OUT"}]}',
    "plain": '{"inputs":[{"name":"A","shape":[2],"datatype":"FP32","data":[%s,2.0]}]}',
    "spaces": '{"inputs": [{"name": "A", "shape": [2], "datatype": "FP32", "data": [%s, 2.0]}]}',
    "outputs": '{"id":"%s","inputs":[{"name":"A","shape":[2],"datatype":"FP32","data":[0.1,2]}],'
    '"outputs":[{"name":"OUT","parameters":{"binary_data":false}}]}',
    "binary": '{"inputs":[{"name":"A","shape":[2],"datatype":"FP32","data":[%s,2.0]}],'
    '"parameters":{"binary_data_output":true}}',
    "sequence": '{"inputs":[{"name":"A","shape":[2],"datatype":"FP32","data":[0.1,2]}],"parameters":'
    '{"sequence_id":%s,"sequence_start":true,"sequence_end":false,"x":1,"y":0.5}}',
}


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("fields", CLIENTS.values(), ids=CLIENTS)
def test_what_clients_send_calls_nothing_of_the_frontend(server, fields, body):
    messages = [post((body % n).encode(), b"/infer", *fields) for n in range(1, 6)]
    ask(server, messages[:2])
    called = set(ask(server, messages[2:]))
    assert [status for status, *_ in server.answers()] == [200] * 5
    # Sequence ids and custom parameters become a request's context in Python.
    assert called <= (
        {"varied", "json_parameters", "<genexpr>"} if "sequence_id" in body else set()
    )


@pytest.mark.parametrize(
    ("datatype", "size", "answer"),
    [
        ("UINT8", 1, [0, 0, 128, 63]),
        ("FP16", 2, "sending FP16 data via JSON is not supported"),
        ("BYTES", 0, "output 'OUT'"),
    ],
)
def test_json_outputs_are_formatted_or_python_says_why_not(server, datatype, size, answer):
    signature = Signature((TensorSpec("OUT", datatype, 1, size),), ())
    shape = ((4 // size if size else 1,),)
    for _ in range(2):
        server.receive(infer_json([1.0]))
        server.model.answer(signature=signature, shapes=shape)
        ((status, header, _),) = server.answers()
        server.transport.sent.clear()
        if isinstance(answer, str):
            assert status >= 400
            assert answer in header["error"]
        else:
            assert header["outputs"] == [json_output(datatype, answer)]


def test_answers_of_another_datatype_say_so(server):
    integers = Signature((TensorSpec("OUT", "INT32", 1, 4),), ())
    for signature in (OUT, integers, OUT):
        server.receive(infer(b"abcd", "x"))
        server.model.answer(signature=signature)
    told = [header["outputs"][0]["datatype"] for _, header, _ in server.answers()]
    assert told == ["FP32", "INT32", "FP32"]


def test_a_body_in_pieces_is_received_in_its_place(server):
    request = infer(b"0123456789abcdef" * 64, "x")
    cut = len(request) - 900
    server.receive(request[:cut], request[cut : cut + 100], request[cut + 100 :])
    assert server.model.waiting[0].copied == 1024 - 900
    server.model.answer()
    assert server.answers() == [(200, header_of("x", 1024), b"0123456789abcdef" * 64)]


def test_answers_keep_the_order_of_their_requests(server):
    server.receive(infer(b"aaaa", "1") + infer(b"bbbbbbbb", "2"))
    server.model.answer(1)
    assert not server.transport.sent
    server.model.answer()
    assert [header["id"] for _, header, _ in server.answers()] == ["1", "2"]


def test_a_client_that_goes_away_takes_its_request_with_it(server):
    request = infer(b"abcd", "x")
    server.receive(request)
    assert (len(server.model.waiting), server.lent) == (1, 1)
    server.receive(request[:-2])
    assert server.lent == 2
    server.connection.connection_lost(None)
    assert (server.model.waiting, server.lent) == ([], 0)


def test_a_model_that_is_loaded_during_a_body_gets_the_request(server):
    request = infer(b"abcd", "x")
    server.receive(request[:-2])
    before, server.model = server.model, Model(server.arena, version=2)
    server.endpoint.serve(server.model)
    server.receive(request[-2:])
    assert not before.waiting
    server.model.answer()
    assert server.answers() == [(200, header_of("x", 4, "2"), b"abcd")]


def test_an_answer_is_of_the_model_that_was_asked(server):
    server.receive(infer(b"abcd", "x"))
    server.endpoint.serve(Model(server.arena, version=2))
    server.model.answer()
    assert server.answers() == [(200, header_of("x", 4), b"abcd")]


def test_the_error_with_which_a_model_refuses_is_the_answer(server):
    server.model.refusal = BridgeError("not now", ErrorCode.UNAVAILABLE)
    server.receive(infer(b"abcd", "x"))
    assert server.answers() == [(503, {"error": "not now"}, b"")]


def test_unusual_requests_are_answered_by_python(server):
    server.receive(infer(b"abcd", "x"))
    server.model.answer(parameters={"mine": 1})
    server.receive(infer(b"abcd", "y", parameters={}))
    server.model.answer()
    (_, first, _), (_, second, rest) = server.answers()
    assert first["parameters"] == {"mine": 1}
    assert second["outputs"][0]["data"] == [pytest.approx(1.6777999408082104e22)]
    assert not rest


def test_a_traced_request_says_when_it_came(server):
    server.model.sampling.active = server.model.sampling.every = True
    server.receive(infer(b"abcd", "x"))
    server.model.answer()
    assert server.model.origins[-1].protocol == "HTTP"
    assert server.answers() == [(200, header_of("x", 4), b"abcd")]


def test_without_room_a_request_is_refused():
    server = Server(limit=1 << 20)
    for number in range(20):
        server.receive(infer(b"abcd" * 15_000, str(number)))
    asked = len(server.model.waiting)
    while server.model.waiting:
        server.model.answer()
    assert 0 < asked < 20
    assert [status for status, _, _ in server.answers()] == [200] * asked + [503] * (20 - asked)
    assert server.lent == 0


LARGE = bytes(range(256)) * 3000
KIB = 1 << 10


@pytest.fixture
def unrouted(server):
    """A server whose router is asked for nothing."""

    def route(head):
        raise AssertionError(head)

    server.connection._route = route
    return server


def held(server):
    return server.connection.account.held


def test_a_large_body_is_charged_as_it_arrives(unrouted):
    server, message = unrouted, infer(LARGE, "large")
    server.receive(message[:10_000])
    server.receive(message[10_000:300_000])
    assert 512 * KIB <= held(server) <= 513 * KIB
    assert list(server.regions.budget.arriving)
    server.receive(message[300_000:])
    assert held(server) >= len(LARGE)
    assert not server.regions.budget.arriving
    (request,) = server.model.waiting
    assert request.copied < 10_000
    server.model.answer()
    ((status, header, data),) = server.answers()
    assert (status, header["id"], data) == (200, "large", LARGE)
    assert held(server) == 0


@pytest.mark.parametrize("cut", [1, 100, 16 * KIB, 512 * KIB, 512 * KIB + 300, 700 * KIB])
def test_any_split_of_a_large_body_is_read_alike(unrouted, cut):
    message = infer(LARGE, "large") + infer(b"abcd", "small")
    unrouted.receive(message[:cut], message[cut:])
    unrouted.model.answer(1)
    unrouted.model.answer()
    assert [(head["id"], data) for _, head, data in unrouted.answers()] == [
        ("large", LARGE),
        ("small", b"abcd"),
    ]


def test_a_large_body_whose_memory_others_need_is_refused(unrouted):
    server, message = unrouted, infer(LARGE, "large")
    server.receive(message[:300_000])
    (body,) = server.regions.budget.arriving
    body.refuse(BridgeError("full", ErrorCode.UNAVAILABLE))
    assert (held(server), server.lent) == (0, 0)
    server.receive(message[300_000:], infer(b"abcd", "small"))
    server.model.answer()
    assert [status for status, *_ in server.answers()] == [503, 200]


def test_a_large_body_that_never_fits_is_refused_by_its_head():
    server = Server(limit=256 * KIB)
    message = infer(LARGE, "large", b"Expect: 100-continue")
    server.receive(message[: -len(LARGE)])
    ((status, header, _),) = server.answers()
    assert status == 503
    assert "--request-arena-limit" in header["error"]
    assert server.lent == 0
    server.regions.close()


def test_a_large_body_is_waited_for(unrouted):
    message = infer(LARGE, "large", b"Expect: 100-continue")
    head = message.index(b"\r\n\r\n") + 4
    unrouted.receive(message[:head])
    assert unrouted.transport.sent.startswith(b"HTTP/1.1 100 ")
    unrouted.transport.sent.clear()
    unrouted.receive(message[head:])
    unrouted.model.answer()
    assert unrouted.answers()[0][2] == LARGE


def test_a_large_body_goes_to_the_model_that_is_there_at_its_end(unrouted):
    message = infer(LARGE, "large")
    unrouted.receive(message[:300_000])
    newer = Model(unrouted.arena, version=2)
    unrouted.endpoint.serve(newer)
    unrouted.receive(message[300_000:])
    assert not unrouted.model.waiting
    newer.answer()
    assert unrouted.answers()[0][1]["model_version"] == "2"


def test_a_large_body_that_ends_with_its_connection_gives_its_memory_back(unrouted):
    unrouted.receive(infer(LARGE, "large")[:300_000])
    assert unrouted.lent == 1
    unrouted.connection.connection_lost(None)
    assert (unrouted.lent, held(unrouted)) == (0, 0)


@pytest.mark.parametrize(
    ("members", "status"),
    [({"parameters": {"binary_data_output": True, "x": 0.5}}, 200), ({"inputs": []}, 400)],
)
def test_python_has_a_large_body_with_its_charge(unrouted, members, status):
    unrouted.receive(infer(LARGE, "large", **members))
    if status == 200:
        assert held(unrouted) >= len(LARGE)
        unrouted.model.answer()
    assert [answer[0] for answer in unrouted.answers()] == [status]
    assert held(unrouted) == 0


def test_long_json_is_charged_as_its_body_was(unrouted):
    for count in (1, 50_000):
        unrouted.receive(infer_json([0.25] * count))
        assert (held(unrouted) > 4 * count) == (count > 1)
        unrouted.model.answer()
    assert [head["outputs"][0]["shape"] for _, head, _ in unrouted.answers()] == [[1], [50_000]]
    assert (held(unrouted), unrouted.lent) == (0, 0)


@pytest.mark.parametrize("fields", [{}, {"parameters": {"mine": 1}}], ids=["plain", "parameters"])
def test_the_text_of_a_long_answer_is_charged(server, monkeypatch, fields):
    ask(server, [infer_json([0.25])] * 2)
    charges = []
    budget = type(server.regions.budget)
    monkeypatch.setattr(budget, "take", lambda _, nbytes, **__: charges.append(nbytes))
    monkeypatch.setattr(budget, "give_back", lambda _, nbytes: charges.append(-nbytes))
    values = np.arange(50_000, dtype=np.float32)
    server.receive(infer_json([0.25]))
    request = server.model.waiting.pop()
    server.model.take(request)
    request.finish(InferResponse(OUT, ((50_000,),), [memoryview(values.tobytes())], **fields))
    _, header, _ = server.answers()[-1]
    assert header["outputs"] == [json_output("FP32", values.tolist())]
    assert charges[0] > 6 * 50_000
    # The transport of this test keeps a copy.
    assert charges == [charges[0], -charges[0]]


async def test_long_json_is_parsed_by_a_worker_and_known_from_then_on(server):
    message = infer_json([0.25] * 50_000)
    server.receive(message)
    assert not server.model.waiting
    await WORKERS.tasks.finished()
    server.model.answer()
    assert "parse_long" not in ask(server, [message])
    server.receive(infer_json([0.25] * 50_000 + ["x"]))
    await WORKERS.tasks.finished()
    assert [status for status, *_ in server.answers()] == [200, 200, 400]
