"""Plain ModelInfer calls: taken and answered without Python, or handed to it whole."""

import asyncio
import sys
from contextlib import asynccontextmanager

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.infer import InferCall
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import inputs_of, raw

PACKAGES = ("gpubridge.frontend", "gpubridge.protocol", "gpubridge.host_shm")
RESET = 3
CANCEL = (8).to_bytes(4, "big")


def call(stream_id, data=b"goodbad!", *fields, model="m"):
    request = raw(("A", "FP32", [len(data) // 4], data), id=f"id {stream_id}")
    request.model_name = model
    sent = frame(0, 1, stream_id, message(request.SerializeToString()))
    return head(stream_id, "ModelInfer", *fields) + sent


@pytest.fixture
def opened(monkeypatch):
    """The calls that Python has opened."""
    opened = []
    begin = InferCall.__init__

    def note(self, *arguments):
        opened.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(InferCall, "__init__", note)
    return opened


@asynccontextmanager
async def connected(**options):
    """Give a connection that knows its form of request."""
    endpoint = GrpcEndpoint(**options)
    endpoint.receive(PREFACE, call(1))
    await endpoint.settle()
    assert endpoint.statuses() == {1: [0]}
    yield endpoint
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)


async def test_a_known_form_of_request_calls_nothing_of_the_frontend():
    called = []

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(PACKAGES):
            called.append(frame.f_code.co_name)

    async with connected() as endpoint:
        # The first answer with a signature asks for its template.
        endpoint.receive(call(3))
        await endpoint.settle()
        sys.setprofile(note)
        try:
            for stream_id in range(5, 25, 2):
                endpoint.receive(call(stream_id, b"abcd" * stream_id))
                await endpoint.settle()
        finally:
            sys.setprofile(None)
        assert endpoint.statuses() == {stream_id: [0] for stream_id in range(1, 25, 2)}
        assert endpoint.data(23).endswith(b"abcd")
        # That of the transport's own is called with what it is to send.
        assert set(called) <= {"flushed"}


def end_connection(endpoint):
    endpoint.lose()


def reset(endpoint):
    endpoint.receive(frame(RESET, 0, 3, CANCEL))


@pytest.mark.parametrize("end", [end_connection, reset])
async def test_a_call_that_nobody_waits_for_is_cancelled(end):
    async with connected(deferred=True) as endpoint:
        endpoint.receive(call(3))
        assert len(endpoint.waiting) == 1
        end(endpoint)
        ((model, request),) = endpoint.waiting
        assert endpoint.cancelled == [request]
        assert endpoint.connection.calls == {}
        model.answer(request)
        endpoint.waiting.clear()
        assert 3 not in endpoint.statuses()


async def test_a_server_that_stops_fails_the_calls_that_are_open():
    async with connected(deferred=True) as endpoint:
        endpoint.receive(call(3))
        endpoint.connection.finish()
        await endpoint.settle()
        assert endpoint.statuses()[3] == [14]


async def test_an_error_of_the_model_is_the_status():
    async with connected(deferred=True) as endpoint:
        endpoint.receive(call(3))
        ((_, request),) = endpoint.waiting
        slot, request.slot = request.slot, None
        endpoint.regions.arena("m").free(slot)
        request.finish(BridgeError("no luck", ErrorCode.UNAVAILABLE))
        endpoint.waiting.clear()
        await endpoint.settle()
        assert endpoint.statuses()[3] == [14]


async def test_without_room_a_call_is_refused():
    async with connected(deferred=True) as endpoint:
        for stream_id in range(3, 503, 2):
            endpoint.receive(call(stream_id, b"abcd" * 15_000))
        await endpoint.settle()
        statuses = {status for (status,) in endpoint.statuses().values()}
        assert statuses == {0, 14}


@pytest.mark.parametrize(
    ("fields", "model", "status"),
    [
        ((("grpc-timeout", "1H"),), "m", 0),
        ((("grpc-encoding", "gzip"),), "m", 0),
        ((("grpc-encoding", "none"),), "m", 12),
        ((), "d", 12),
        ((), "missing", 5),
    ],
)
async def test_unusual_requests_are_read_by_python(opened, fields, model, status):
    async with connected() as endpoint:
        opened.clear()
        for stream_id in (3, 5):
            endpoint.receive(call(stream_id, b"goodbad!", *fields, model=model))
            await endpoint.settle()
        assert endpoint.statuses() == {1: [0], 3: [status], 5: [status]}
        assert len(opened) == (0 if status == 12 and fields else 2)


LARGE = bytes(range(256)) * 3000
KIB = 1 << 10


def large(stream_id, *, model="m", size=16 * KIB, **fields):
    """A large request and its answer's status, in frames of so many bytes."""
    request = raw(("A", "FP32", [len(LARGE) // 4], LARGE), id="large", **fields)
    request.model_name = model
    sent = message(request.SerializeToString())
    parts = [sent[at : at + size] for at in range(0, len(sent), size)]
    frames = [frame(0, part is parts[-1], stream_id, part) for part in parts]
    return head(stream_id, "ModelInfer") + b"".join(frames)


@asynccontextmanager
async def large_known(**options):
    """Give a connection that knows its form of large request, too."""
    async with connected(**options) as endpoint:
        endpoint.receive(large(3))
        await endpoint.settle()
        yield endpoint


def held(endpoint):
    return endpoint.connection.account.held


@pytest.mark.parametrize("size", [1000, 16 * KIB, 512 * KIB])
@pytest.mark.parametrize("cut", [1, 60, 16 * KIB, 512 * KIB, 512 * KIB + 300, 750 * KIB])
async def test_a_large_message_is_received_and_charged_without_python(opened, cut, size):
    async with large_known(deferred=True) as endpoint:
        opened.clear()
        sent = large(5, size=size)
        endpoint.receive(sent[:cut])
        if cut > 20 * KIB:
            assert min(cut, 512 * KIB) <= held(endpoint) <= 512 * KIB + cut
            assert list(endpoint.regions.budget.arriving)
        endpoint.receive(sent[cut:] + call(7, b"abcdabcd"))
        assert not endpoint.regions.budget.arriving
        assert held(endpoint) >= len(LARGE)
        (_, request), _ = endpoint.waiting
        assert inputs_of(request) == [LARGE]
        # Frames of a small size are only received in their place by vectored reads.
        assert request.copied < 100 * KIB or size < 512 * KIB
        await endpoint.settle()
        assert (endpoint.statuses()[5], endpoint.statuses()[7], held(endpoint)) == ([0], [0], 0)
        assert not opened


async def test_a_message_in_pieces_is_taken_without_python(opened):
    async with connected() as endpoint:
        opened.clear()
        sent = call(5, b"abcd" * 100)
        for at in range(len(sent)):
            endpoint.receive(sent[at : at + 1])
        await endpoint.settle()
        assert endpoint.statuses()[5] == [0]
        assert not opened


def refuse(endpoint):
    (body,) = endpoint.regions.budget.arriving
    body.refuse(BridgeError("full", ErrorCode.UNAVAILABLE))


def half_close(endpoint):
    endpoint.end()


@pytest.mark.parametrize(
    ("end", "status"), [(end_connection, None), (refuse, [14]), (half_close, [13])]
)
@pytest.mark.parametrize("checked", [False, True], ids=["plane", "python"])
async def test_a_large_message_that_does_not_end_gives_its_memory_back(
    opened, end, status, checked
):
    async with large_known() as endpoint:
        sent = large(5)
        endpoint.receive(sent[: 300 * KIB])
        if checked:
            # How fast it comes is Python's to look at, which has it from then on.
            opened.clear()
            endpoint.connection.check(asyncio.get_running_loop().time())
            assert len(opened) == 1
            endpoint.receive(sent[300 * KIB : 600 * KIB])
        assert endpoint.regions.lent()[0] == 1
        end(endpoint)
        assert (endpoint.regions.lent()[0], held(endpoint)) == (0, 0)
        await endpoint.settle()
        assert endpoint.statuses().get(5) == status
        assert not endpoint.connection.calls


async def test_a_slow_large_message_goes_on_in_python():
    async with large_known(deferred=True) as endpoint:
        sent = large(5)
        endpoint.receive(sent[: 300 * KIB])
        endpoint.connection.check(asyncio.get_running_loop().time())
        endpoint.receive(sent[300 * KIB :])
        ((_, request),) = endpoint.waiting
        assert inputs_of(request) == [LARGE]
        await endpoint.settle()
        assert (endpoint.statuses()[5], held(endpoint)) == ([0], 0)


async def test_a_large_message_that_is_too_slow_fails():
    async with large_known() as endpoint:
        endpoint.receive(large(5)[: 300 * KIB])
        now = asyncio.get_running_loop().time()
        for seconds in (0, 31, 62):
            endpoint.connection.check(now + seconds)
        await endpoint.settle()
        assert (endpoint.statuses()[5], held(endpoint)) == ([4], 0)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"model_version": "1"}, 0),
        ({"model": "d"}, 12),
        ({"model": "missing"}, 5),
        ({"raw_input_contents": [b"\0" * 7]}, 3),
    ],
)
async def test_python_has_a_large_message_with_its_charge(opened, options, status):
    async with large_known() as endpoint:
        opened.clear()
        endpoint.receive(large(5, **options))
        await endpoint.settle()
        assert (endpoint.statuses()[5], held(endpoint)) == ([status], 0)
        assert len(opened) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_connections_without_a_call_stand_in_the_order_in_which_they_became_so(streamed):
    """Plain calls are those of the compiled half, streams those of Python."""
    ping = frame(6, 0, 0, b"12345678")

    async with connected() as first:
        second, third = GrpcEndpoint(beside=first), GrpcEndpoint(beside=first)
        endpoints = {
            endpoint.connection: number for number, endpoint in enumerate((first, second, third))
        }

        def idle():
            return [endpoints[connection] for connection in first.idle.first(9)]

        second.receive(PREFACE)
        third.receive(PREFACE)
        assert idle() == [0, 1, 2]
        assert [endpoints[each] for each in first.idle.first(2)] == [0, 1]
        second.receive(ping)
        assert idle() == [0, 2, 1]
        first.deferred = True
        sent = head(3, "ModelStreamInfer") if streamed else call(3)
        first.receive(sent)
        await first.settle()
        first.deferred = False
        if streamed:
            assert idle() == [2, 1]
            first.receive(frame(RESET, 0, 3, CANCEL))
        assert idle() == [2, 1, 0]
        third.receive(head(1, "ModelInfer"))
        assert idle() == [1, 0]
        second.connection.leave()
        assert idle() == [0]
        third.lose()
        second.lose()
        assert idle() == [0]
