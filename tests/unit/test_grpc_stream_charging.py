"""Messages of a stream that are on their way are charged to their connection, as they arrive."""

from __future__ import annotations

import asyncio

import pytest

from gpubridge.frontend.grpc import stream
from tests.fuzz.grpc_door import PREFACE, GrpcDoor, frame, head, message
from tests.unit.grpc_requests import raw

KIB = 1 << 10
FRAME = 16 * KIB
VALUES = 250_000
LARGE = message(raw(("A", "FP32", [VALUES], b"abcd" * VALUES)).SerializeToString())
SMALL = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())
UNAVAILABLE, DEADLINE_EXCEEDED = 14, 4


def send(door, stream_id, data):
    for at in range(0, len(data), FRAME):
        door.receive(frame(0, 0, stream_id, data[at : at + FRAME]))


def opened(streams, **options):
    door = GrpcDoor(**options)
    door.receive(PREFACE + b"".join(head(2 * i + 1, "ModelStreamInfer") for i in range(streams)))
    return door


def held(door):
    return door.connection.account.held


def run(scenario):
    async def inside():
        door = opened(1)
        await scenario(door)
        door.lose()
        assert held(door) == 0
        assert door.regions.lent() == (0, 0)
        door.regions.close()
        assert door.regions.budget.used == 0

    asyncio.run(inside())


def test_a_large_message_counts_as_it_arrives():
    async def scenario(door):
        send(door, 1, LARGE[: 4 * FRAME])
        assert held(door) == 0
        send(door, 1, LARGE[4 * FRAME : 20 * FRAME])
        assert held(door) == door.regions.budget.used == 20 * FRAME
        send(door, 1, LARGE[20 * FRAME :] + SMALL)
        await asyncio.sleep(0)
        assert held(door) == 0
        assert door.submitted == 2

    run(scenario)


def test_a_connection_that_holds_more_than_its_share_makes_room():
    async def scenario(door):
        # Seven of eight MiB; an eighth is the share.
        for i in range(1, 7):
            door.receive(head(2 * i + 1, "ModelStreamInfer"))
        for i in range(7):
            send(door, 2 * i + 1, LARGE[:-1])
        other = opened(1, beside=door)
        send(other, 1, LARGE)
        await asyncio.sleep(0)
        assert other.statuses() == {}
        assert other.data(1).endswith(b"abcd")
        # The newest are gone: one for the message, one for the request. The others go on.
        assert door.statuses() == {13: [UNAVAILABLE], 11: [UNAVAILABLE]}
        send(door, 1, LARGE[-1:])
        await asyncio.sleep(0)
        assert door.data(1).endswith(b"abcd")
        other.lose()

    run(scenario)


def test_a_large_message_that_comes_too_slowly_ends_its_call():
    async def scenario(door):
        window = int(door.connection._message_timeout)
        for _ in range(3):
            send(door, 1, LARGE)
        door.connection.check(0)
        door.connection.check(window + 1)
        assert door.statuses() == {}
        send(door, 1, LARGE[: 60 * FRAME])
        for time in range(2, 2 * window):
            door.connection.check(window + time)
            send(door, 1, LARGE[60 * FRAME :][time : time + 1])
        assert door.statuses() == {1: [DEADLINE_EXCEEDED]}
        assert held(door) == 0

    run(scenario)


LONG_INPUT = raw(("A", "FP32", [VALUES], b"abcd" * VALUES)).SerializeToString()


@pytest.fixture
def in_pieces(monkeypatch):
    """Have messages of more than 64 KiB copied in such pieces."""
    monkeypatch.setattr(stream, "HEAVY_BYTES", 64 * KIB)
    monkeypatch.setattr(stream, "PIECE", 64 * KIB)


async def turns_until(condition):
    turns = 0
    while not condition():
        turns += 1
        assert turns < 10_000
        await asyncio.sleep(0)
    return turns


@pytest.mark.usefixtures("in_pieces")
def test_the_loop_runs_while_a_long_message_is_copied():
    async def scenario(door):
        send(door, 1, LARGE + SMALL)
        assert await turns_until(lambda: door.submitted == 2) >= len(LARGE) >> 16
        await asyncio.sleep(0)
        assert door.data(1).count(b"abcd") == 2

    run(scenario)


@pytest.mark.usefixtures("in_pieces")
def test_a_call_that_ends_beside_a_long_message_holds_nothing():
    async def scenario(door):
        send(door, 1, LARGE)
        assert held(door) > 0
        door.receive(frame(3, 0, 1, bytes(4)))
        assert held(door) == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert door.submitted == 0

    run(scenario)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (LONG_INPUT[:-1] + b"\x0f" * 9, b"Unable to parse request"),
        (LONG_INPUT.replace(b"FP32", b"FP33"), b"data-type is '<invalid>'"),
    ],
)
def test_a_long_message_that_is_no_request_is_told_and_the_next_is_taken(wrong, text):
    async def scenario(door):
        send(door, 1, message(wrong) + SMALL)
        await turns_until(lambda: door.submitted == 1)
        await asyncio.sleep(0)
        assert door.data(1).index(text) < door.data(1).index(b"abcd")
        assert door.statuses() == {}

    run(scenario)
