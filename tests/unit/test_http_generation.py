"""Generate requests over HTTP: taken and answered without Python, or handed to it within an answer."""

import asyncio
import struct
import sys
from types import SimpleNamespace

import orjson
import pytest

from gpubridge.errors import invalid
from gpubridge.frontend.forwarded_headers import NO_HEADERS
from gpubridge.frontend.generate_endpoint import GenerateEndpoint
from gpubridge.frontend.routes import V2Router
from gpubridge.request import InferResponse
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.unit.http_endpoint import post
from tests.unit.model_configs import model_config
from tests.unit.test_http_inference import OUT, PACKAGES, WORKERS, Model, Server
from tests.waits import until

CONFIG = model_config(
    "A FP32 [-1]", "OUT FP32 [-1]", "model_transaction_policy { decoupled: true }"
)
END = b"0\r\n\r\n"


class Generator(Model):
    """Takes requests, and keeps their memory until the test ends them."""

    def __init__(self, arena):
        super().__init__(arena, config=CONFIG)
        self.passed = 0

    def submit(self, request, origin=None):
        request.instance = self
        super().submit(request, origin)
        self.last = request

    def passed_on(self, request, responses):
        self.passed += responses


class Generating(Server):
    """A generate endpoint, and a connection to it."""

    def __init__(self, events):
        self.events = events
        super().__init__()
        self.model.arena = self.arena

    def endpoint_of(self, memory):
        self.model = Generator(self.arena)
        given = lambda: self.model, memory.arenas.arena, WORKERS, NO_HEADERS
        return GenerateEndpoint(self.model, *given, events=self.events)

    def ask(self, value):
        self.receive(post(orjson.dumps({"A": value, "id": "i"}), b"/infer"))
        return self.model.waiting[-1]

    def end(self, outcome=None):
        request = self.model.waiting.pop()
        self.model.take(request)
        request.finish(outcome)

    def take_sent(self):
        sent = bytes(self.transport.sent)
        self.transport.sent.clear()
        return sent


def server_of(events):
    """A server that knows the form of requests."""
    server = Generating(events)
    for _ in range(3):
        server.ask(0.5)
        server.end(response(0.5))
    server.take_sent()
    server.model.passed = 0
    return server


@pytest.fixture(params=[False, True])
def kind(request):
    return request.param


@pytest.fixture
def server(kind):
    server = server_of(kind)
    yield server
    server.connection.connection_lost(None)
    assert server.lent == 0
    server.regions.close()


events = pytest.mark.parametrize("kind", [True], indirect=True)
one = pytest.mark.parametrize("kind", [False], indirect=True)


def response(*values, **fields):
    data = memoryview(struct.pack(f"<{len(values)}f", *values))
    return InferResponse(OUT, [(len(values),)], [data], **fields)


def text(value, **more):
    members = {"OUT": value, "id": "i", "model_name": "m", "model_version": "1", **more}
    return orjson.dumps(dict(sorted(members.items())))


def event(body):
    body = b"data: " + body + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


def calls(work):
    """Return the functions of the frontend that are called meanwhile."""
    called = []

    def note(frame, what, _):
        if what == "call" and frame.f_globals.get("__name__", "").startswith(PACKAGES):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


@one
@pytest.mark.parametrize("early", [False, True])
def test_one_response_is_sent_without_python(server, early):
    def work():
        for number in range(1, 4):
            request = server.ask([float(number)] * number)
            if early:
                request.respond(response(number + 0.5))
            server.end(None if early else response(number + 0.5))

    called = calls(work)
    answers = server.answers()
    assert [(status, head) for status, head, _ in answers] == [
        (200, orjson.loads(text(number + 0.5))) for number in range(1, 4)
    ]
    assert not called
    assert server.model.passed == (3 if early else 0)


@events
def test_events_are_sent_without_python(server):
    def work():
        for number in range(3):
            request = server.ask(float(number))
            request.respond(response(0.5))
            request.respond(response(1.5, 2.5))
            server.end(response(3.5) if number else None)

    called = calls(work)
    sent = server.take_sent()
    assert not called
    assert server.model.passed == 6
    for number, answer in enumerate(sent.split(END)[:-1]):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"text/event-stream; charset=utf-8" in head
        values = [0.5, [1.5, 2.5], 3.5] if number else [0.5, [1.5, 2.5]]
        assert body == b"".join(event(text(value)) for value in values)


@events
def test_a_client_that_does_not_read_lets_the_model_send_no_more(server):
    request = server.ask(1.0)
    server.connection.pause_writing()
    request.respond(response(0.5))
    assert server.model.passed == 0
    server.connection.resume_writing()
    assert server.model.passed == 1
    server.end()
    assert server.take_sent().endswith(event(text(0.5)) + END)


@events
def test_python_goes_on_with_what_the_plane_cannot_write(server):
    request = server.ask(1.0)
    server.connection.pause_writing()
    request.respond(response(0.5))
    request.respond(invalid("told"))
    request.respond(response(1.5, parameters={"k": 1}))
    request.respond(response(2.5))
    assert server.model.passed == 0
    server.connection.resume_writing()
    assert server.model.passed == 4
    server.end(response(3.5))
    _, _, body = server.take_sent().partition(b"\r\n\r\n")
    bodies = [text(0.5), b'{"error":"told"}', text(1.5, k=1), text(2.5), text(3.5)]
    assert body == b"".join(map(event, bodies)) + END


@events
def test_a_long_event_is_a_workers_and_others_wait_for_it(server):
    async def work():
        request = server.ask(1.0)
        request.respond(response(0.5))
        request.respond(response(*[1.0] * (1 << 19)))
        server.end(response(2.5))
        assert not server.take_sent().endswith(END)
        await until(lambda: server.transport.sent.endswith(END))

    asyncio.run(work())
    values = [
        orjson.loads(line[6:])["OUT"]
        for line in server.take_sent().split(b"\n")
        if line[:5] == b"data:"
    ]
    assert values[1] == 2.5
    assert len(values[0]) == 1 << 19


@pytest.mark.parametrize("late", [False, True])
def test_an_error_has_its_status(server, late, kind):
    request = server.ask(1.0)
    if late:
        request.respond(invalid("told"))
    if server.model.waiting:
        server.end(None if late else invalid("told"))
    head, _, body = server.take_sent().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert body == (event(b'{"error":"told"}') + END if kind else b'{"error":"told"}')


@one
@pytest.mark.parametrize("follows", [False, True])
def test_a_long_answer_is_charged_until_it_is_read(server, follows, monkeypatch):
    charges = []

    def charged(budget, texts):
        assert budget is server.regions.budget
        charges.append(sum(map(len, texts)))
        return texts

    for module in ("generate", "generate_endpoint"):
        monkeypatch.setattr(f"gpubridge.frontend.{module}.charged", charged)
    server.ask(1.0)
    server.end(response(*[1.5] * (1 << 15), parameters={"k": 1} if follows else None))
    ((status, answer, _),) = server.answers()
    assert (status, len(answer["OUT"])) == (200, 1 << 15)
    assert charges[0] > 1 << 17


@one
@pytest.mark.parametrize("count", [0, 2])
def test_generate_wants_exactly_one_response(server, count):
    request = server.ask(1.0)
    for _ in range(count):
        request.respond(response(0.5))
    if server.model.waiting:
        server.end()
    ((status, answer, _),) = server.answers()
    assert (status, "exactly 1 response" in answer["error"]) == (400, True)


@pytest.mark.parametrize("follows", [False, True])
def test_a_client_that_leaves_cancels_its_request(server, follows):
    request = server.ask(1.0)
    if follows:
        request.respond(response(0.5, parameters={"k": 1}))
        request.respond(response(0.5, parameters={"k": 1}))
    server.connection.connection_lost(None)
    assert not server.model.waiting
    assert request.on_done is None


@events
def test_a_bug_of_the_plane_ends_no_answer(server, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("planted")

    request = server.ask(1.0)
    request.respond(response(0.5))
    monkeypatch.setattr("gpubridge.frontend.generate_endpoint.generated_template", broken)
    other = Signature((TensorSpec("OTHER", "FP32", 1, 4),), ())
    request.respond(InferResponse(other, [(1,)], [memoryview(b"\0\0\0\0")]))
    server.end(response(1.5))
    _, _, second, third = server.take_sent().split(b"data: ")
    assert (b"is a bug of gpubridge" in second, text(1.5) in third) == (True, True)


def test_a_body_comes_in_pieces_or_is_wrong_and_the_next_is_taken(server):
    body = post(orjson.dumps({"A": [1.0, 2.0], "id": "i"}), b"/infer")
    for at in range(1, len(body), 7):
        server.receive(body[:at], body[at:])
        assert server.model.last.dims == struct.pack("<q", 2)
        server.end(response(0.5))
        assert text(0.5) in server.take_sent()
    server.receive(post(b'{"A": [1.0, "x"], "id": "i"}', b"/infer"))
    assert server.take_sent().startswith(b"HTTP/1.1 400 ")
    assert server.lent == 0


@events
def test_the_router_gives_further_requests_for_a_path_to_the_plane_while_its_model_is_there(server):
    def find(*_):
        if server.model is None:
            raise invalid("gone")
        return server.model

    repository = SimpleNamespace(regions=server.regions, find=find, telemetry=None)
    router = V2Router(repository, None, WORKERS, strict_readiness=False)
    head = SimpleNamespace(method=b"POST", field=lambda _: None)
    for head.target in (b"/v2/models/m/generate", b"/v2/models/m/versions/1/generate_stream"):
        router.route(head)
        assert isinstance(router.targets.find(head.target), GenerateEndpoint)
    router.model_changed("m")
    assert len(router.targets) == 2
    server.model = None
    router.model_changed("m")
    assert len(router.targets) == 0
