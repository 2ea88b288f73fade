"""Plain ModelInfer calls: taken and answered without Python, or handed to it whole."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.infer import InferCall
from tests.fuzz.grpc_door import PREFACE, GrpcDoor, frame, head, message
from tests.unit.grpc_requests import inputs_of, raw

PACKAGES = ("gpubridge.frontend", "gpubridge.protocol", "gpubridge.host_shm")
RESET = 3
CANCEL = (8).to_bytes(4, "big")


def call(stream_id, data=b"goodbad!", *fields, model="m"):
    request = raw(("A", "FP32", [len(data) // 4], data), id=f"id {stream_id}")
    request.model_name = model
    sent = frame(0, 1, stream_id, message(request.SerializeToString()))
    return head(stream_id, "ModelInfer", *fields) + sent


def connected(test, **options):
    """Run a test with a connection that knows its form of request."""

    async def run():
        door = GrpcDoor(**options)
        door.receive(PREFACE, call(1))
        await door.settle()
        assert door.statuses() == {1: [0]}
        await test(door)
        door.lose()
        assert door.regions.lent() == (0, 0)

    asyncio.run(run())


def test_a_known_form_of_request_calls_nothing_of_the_frontend():
    called = []

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(PACKAGES):
            called.append(frame.f_code.co_name)

    async def ask(door):
        # The first answer with a signature asks for its template.
        door.receive(call(3))
        await door.settle()
        sys.setprofile(note)
        try:
            for stream_id in range(5, 25, 2):
                door.receive(call(stream_id, b"abcd" * stream_id))
                await door.settle()
        finally:
            sys.setprofile(None)
        assert door.statuses() == {stream_id: [0] for stream_id in range(1, 25, 2)}
        assert door.data(23).endswith(b"abcd")
        # That of the transport's own is called with what it is to send.
        assert set(called) <= {"flushed"}

    connected(ask)


def end_connection(door):
    door.lose()


def reset(door):
    door.receive(frame(RESET, 0, 3, CANCEL))


@pytest.mark.parametrize("end", [end_connection, reset])
def test_a_call_that_nobody_waits_for_is_cancelled(end):
    async def ask(door):
        door.receive(call(3))
        assert len(door.waiting) == 1
        end(door)
        ((model, request),) = door.waiting
        assert door.cancelled == [request]
        assert door.connection._calls == {}
        model.answer(request)
        door.waiting.clear()
        assert 3 not in door.statuses()

    connected(ask, deferred=True)


def test_a_server_that_stops_fails_the_calls_that_are_open():
    async def ask(door):
        door.receive(call(3))
        door.connection.finish()
        await door.settle()
        assert door.statuses()[3] == [14]

    connected(ask, deferred=True)


def test_an_error_of_the_model_is_the_status():
    async def ask(door):
        door.receive(call(3))
        ((_, request),) = door.waiting
        slot, request.slot = request.slot, None
        door.regions.arena("m").free(slot)
        request.finish(BridgeError("no luck", ErrorCode.UNAVAILABLE))
        door.waiting.clear()
        await door.settle()
        assert door.statuses()[3] == [14]

    connected(ask, deferred=True)


def test_without_room_a_call_is_refused():
    async def ask(door):
        for stream_id in range(3, 503, 2):
            door.receive(call(stream_id, b"abcd" * 15_000))
        await door.settle()
        statuses = {status for (status,) in door.statuses().values()}
        assert statuses == {0, 14}

    connected(ask, deferred=True)


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
def test_what_is_out_of_the_ordinary_is_taken_by_python(monkeypatch, fields, model, status):
    opened = []
    begin = InferCall.__init__

    def note(self, *arguments):
        opened.append(self)
        begin(self, *arguments)

    async def ask(door):
        opened.clear()
        for stream_id in (3, 5):
            door.receive(call(stream_id, b"goodbad!", *fields, model=model))
            await door.settle()
        assert door.statuses() == {1: [0], 3: [status], 5: [status]}
        assert len(opened) == (0 if status == 12 and fields else 2)

    monkeypatch.setattr(InferCall, "__init__", note)
    connected(ask)


# -- large messages ----------------------------------------------------------------------------------

LARGE = bytes(range(256)) * 3000
KIB = 1 << 10


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


def large(stream_id, *, model="m", size=16 * KIB, **fields):
    """A large request and its answer's status, in frames of so many bytes."""
    request = raw(("A", "FP32", [len(LARGE) // 4], LARGE), id="large", **fields)
    request.model_name = model
    sent = message(request.SerializeToString())
    parts = [sent[at : at + size] for at in range(0, len(sent), size)]
    frames = [frame(0, part is parts[-1], stream_id, part) for part in parts]
    return head(stream_id, "ModelInfer") + b"".join(frames)


def large_known(test, **options):
    """Run a test with a connection that knows its form of large request, too."""

    async def run(door):
        door.receive(large(3))
        await door.settle()
        await test(door)

    connected(run, **options)


def held(door):
    return door.connection.account.held


@pytest.mark.parametrize("size", [1000, 16 * KIB, 512 * KIB])
@pytest.mark.parametrize("cut", [1, 60, 16 * KIB, 512 * KIB, 512 * KIB + 300, 750 * KIB])
def test_a_large_message_is_received_and_charged_without_python(opened, cut, size):
    async def ask(door):
        opened.clear()
        sent = large(5, size=size)
        door.receive(sent[:cut])
        if cut > 20 * KIB:
            assert min(cut, 512 * KIB) <= held(door) <= 512 * KIB + cut
            assert list(door.regions.budget.arriving)
        door.receive(sent[cut:] + call(7, b"abcdabcd"))
        assert not door.regions.budget.arriving
        assert held(door) >= len(LARGE)
        (_, request), _ = door.waiting
        assert inputs_of(request) == [LARGE]
        # Frames of a small size are only received in their place by vectored reads.
        assert request.copied < 100 * KIB or size < 512 * KIB
        await door.settle()
        assert (door.statuses()[5], door.statuses()[7], held(door)) == ([0], [0], 0)
        assert not opened

    large_known(ask, deferred=True)


def test_a_message_in_pieces_is_taken_without_python(opened):
    async def ask(door):
        opened.clear()
        sent = call(5, b"abcd" * 100)
        for at in range(len(sent)):
            door.receive(sent[at : at + 1])
        await door.settle()
        assert door.statuses()[5] == [0]
        assert not opened

    connected(ask)


def refuse(door):
    (body,) = door.regions.budget.arriving
    body.refuse(BridgeError("full", ErrorCode.UNAVAILABLE))


def half_close(door):
    door.end()


@pytest.mark.parametrize(
    ("end", "status"), [(end_connection, None), (refuse, [14]), (half_close, [13])]
)
@pytest.mark.parametrize("checked", [False, True], ids=["plane", "python"])
def test_a_large_message_that_does_not_end_gives_its_memory_back(opened, end, status, checked):
    async def ask(door):
        sent = large(5)
        door.receive(sent[: 300 * KIB])
        if checked:
            # How fast it comes is Python's to look at, which has it from then on.
            opened.clear()
            door.connection.check(door.connection._loop.time())
            assert len(opened) == 1
            door.receive(sent[300 * KIB : 600 * KIB])
        assert door.regions.lent()[0] == 1
        end(door)
        assert (door.regions.lent()[0], held(door)) == (0, 0)
        await door.settle()
        assert door.statuses().get(5) == status
        assert not door.connection._calls

    large_known(ask)


def test_a_slow_large_message_goes_on_in_python():
    async def ask(door):
        sent = large(5)
        door.receive(sent[: 300 * KIB])
        door.connection.check(door.connection._loop.time())
        door.receive(sent[300 * KIB :])
        ((_, request),) = door.waiting
        assert inputs_of(request) == [LARGE]
        await door.settle()
        assert (door.statuses()[5], held(door)) == ([0], 0)

    large_known(ask, deferred=True)


def test_a_large_message_that_is_too_slow_fails():
    async def ask(door):
        door.receive(large(5)[: 300 * KIB])
        now = door.connection._loop.time()
        for seconds in (0, 31, 62):
            door.connection.check(now + seconds)
        await door.settle()
        assert (door.statuses()[5], held(door)) == ([4], 0)

    large_known(ask)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"model_version": "1"}, 0),
        ({"model": "d"}, 12),
        ({"model": "missing"}, 5),
        ({"raw_input_contents": [b"\0" * 7]}, 3),
    ],
)
def test_python_has_a_large_message_with_its_charge(opened, options, status):
    async def ask(door):
        opened.clear()
        door.receive(large(5, **options))
        await door.settle()
        assert (door.statuses()[5], held(door)) == ([status], 0)
        assert len(opened) == 1

    large_known(ask)


@pytest.mark.parametrize("streamed", [False, True])
def test_connections_without_a_call_stand_in_the_order_in_which_they_became_so(streamed):
    """Plain calls are those of the compiled half, streams those of Python."""
    ping = frame(6, 0, 0, b"12345678")

    async def ask(first):
        second, third = GrpcDoor(beside=first), GrpcDoor(beside=first)
        doors = {door.connection: number for number, door in enumerate((first, second, third))}

        def idle():
            return [doors[connection] for connection in first.idle.first(9)]

        second.receive(PREFACE)
        third.receive(PREFACE)
        assert idle() == [0, 1, 2]
        assert [doors[each] for each in first.idle.first(2)] == [0, 1]
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

    connected(ask)
