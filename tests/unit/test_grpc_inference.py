"""Plain ModelInfer calls: taken and answered without Python, or handed to it whole."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.infer import InferCall
from tests.fuzz.grpc_door import PREFACE, GrpcDoor, frame, head, message
from tests.unit.grpc_requests import raw

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
