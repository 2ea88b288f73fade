"""gRPC clients that send no more: they get what they have asked for, and are not waited for."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz.grpc_door import PREFACE, GrpcDoor, frame, head, message
from tests.unit.grpc_requests import raw

REQUEST = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())


def hang_up(sent, *, deferred=False):
    """Send and hang up in one turn of the event loop; returns the door once all is answered."""

    async def converse():
        door = GrpcDoor(deferred=deferred)
        door.receive(PREFACE + sent)
        door.end()
        await door.settle()
        door.connection.connection_lost(None)
        assert door.regions.lent() == (0, 0)
        door.regions.close()
        return door

    return asyncio.run(converse())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_the_answer_comes_although_its_client_has_hung_up(method, deferred):
    door = hang_up(head(1, method) + frame(0, 1, 1, REQUEST), deferred=deferred)
    assert door.statuses() == {1: [0]}
    assert door.closed


def test_an_answer_of_this_very_moment_is_sent_before_the_connection_ends():
    async def converse():
        door = GrpcDoor(deferred=True)
        door.receive(PREFACE + head(1, "ModelInfer") + frame(0, 1, 1, REQUEST))
        for model, request in door.waiting:
            model.answer(request)
        door.end()
        assert door.closed
        return door.statuses()

    assert asyncio.run(converse()) == {1: [0]}


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("size", [3, 20, 70_000])
def test_half_a_request_is_refused(method, size):
    # The beginning of a message that is one long name of a model.
    begun = b"\x0a\xfc\xf0\x04" + b"m" * size
    door = hang_up(head(1, method) + frame(0, 0, 1, message(begun, length=80_000)))
    assert door.statuses() == {1: [13]}
    assert door.closed


def test_an_answer_that_the_windows_hold_back_is_given_up():
    # SETTINGS_INITIAL_WINDOW_SIZE 0: no answer may be sent, and nothing can change that any more.
    no_window = frame(4, 0, 0, b"\0\4\0\0\0\0")
    door = hang_up(no_window + head(1, "ModelInfer") + frame(0, 1, 1, REQUEST))
    assert door.statuses() == {}
    assert door.closed
