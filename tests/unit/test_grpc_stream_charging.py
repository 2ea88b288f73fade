"""Messages of a stream that are on their way are charged to their connection, as they arrive."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gpubridge.config import GrpcConnections
from gpubridge.frontend.grpc import stream
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

KIB = 1 << 10
FRAME = 16 * KIB
VALUES = 250_000
LARGE = message(raw(("A", "FP32", [VALUES], b"abcd" * VALUES)).SerializeToString())
SMALL = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())
UNAVAILABLE, DEADLINE_EXCEEDED = 14, 4


def send(endpoint, stream_id, data):
    for at in range(0, len(data), FRAME):
        endpoint.receive(frame(0, 0, stream_id, data[at : at + FRAME]))


def opened(streams, **options):
    endpoint = GrpcEndpoint(**options)
    endpoint.receive(
        PREFACE + b"".join(head(2 * i + 1, "ModelStreamInfer") for i in range(streams))
    )
    return endpoint


def held(endpoint):
    return endpoint.connection.account.held


@pytest.fixture
@asynccontextmanager
async def endpoint():
    endpoint = opened(1)
    yield endpoint
    endpoint.lose()
    assert held(endpoint) == 0
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0


async def test_a_large_message_counts_as_it_arrives(endpoint):
    send(endpoint, 1, LARGE[: 4 * FRAME])
    assert held(endpoint) == 0
    send(endpoint, 1, LARGE[4 * FRAME : 20 * FRAME])
    assert held(endpoint) == endpoint.regions.budget.used == 20 * FRAME
    send(endpoint, 1, LARGE[20 * FRAME :] + SMALL)
    await asyncio.sleep(0)
    assert held(endpoint) == 0
    assert endpoint.submitted == 2


async def test_a_connection_that_holds_more_than_its_share_makes_room(endpoint):
    # Seven of eight MiB; an eighth is the share.
    for i in range(1, 7):
        endpoint.receive(head(2 * i + 1, "ModelStreamInfer"))
    for i in range(7):
        send(endpoint, 2 * i + 1, LARGE[:-1])
    other = opened(1, beside=endpoint)
    send(other, 1, LARGE)
    await asyncio.sleep(0)
    assert other.statuses() == {}
    assert other.data(1).endswith(b"abcd")
    # The newest are gone: one for the message, one for the request. The others go on.
    assert endpoint.statuses() == {13: [UNAVAILABLE], 11: [UNAVAILABLE]}
    send(endpoint, 1, LARGE[-1:])
    await asyncio.sleep(0)
    assert endpoint.data(1).endswith(b"abcd")
    other.lose()


async def test_a_large_message_that_comes_too_slowly_ends_its_call(endpoint):
    window = int(GrpcConnections().message_timeout)
    for _ in range(3):
        send(endpoint, 1, LARGE)
    endpoint.connection.check(0)
    endpoint.connection.check(window + 1)
    assert endpoint.statuses() == {}
    send(endpoint, 1, LARGE[: 60 * FRAME])
    for time in range(2, 2 * window):
        endpoint.connection.check(window + time)
        send(endpoint, 1, LARGE[60 * FRAME :][time : time + 1])
    assert endpoint.statuses() == {1: [DEADLINE_EXCEEDED]}
    assert held(endpoint) == 0


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
async def test_the_loop_runs_while_a_long_message_is_copied(endpoint):
    send(endpoint, 1, LARGE + SMALL)
    assert await turns_until(lambda: endpoint.submitted == 2) >= len(LARGE) >> 16
    await asyncio.sleep(0)
    assert endpoint.data(1).count(b"abcd") == 2


@pytest.mark.usefixtures("in_pieces")
async def test_a_call_that_ends_beside_a_long_message_holds_nothing(endpoint):
    send(endpoint, 1, LARGE)
    assert held(endpoint) > 0
    endpoint.receive(frame(3, 0, 1, bytes(4)))
    assert held(endpoint) == 0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert endpoint.submitted == 0


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (LONG_INPUT[:-1] + b"\x0f" * 9, b"Unable to parse request"),
        (LONG_INPUT.replace(b"FP32", b"FP33"), b"data-type is '<invalid>'"),
    ],
)
async def test_a_long_message_that_is_no_request_is_told_and_the_next_is_taken(
    endpoint, wrong, text
):
    send(endpoint, 1, message(wrong) + SMALL)
    await turns_until(lambda: endpoint.submitted == 1)
    await asyncio.sleep(0)
    assert endpoint.data(1).index(text) < endpoint.data(1).index(b"abcd")
    assert endpoint.statuses() == {}
