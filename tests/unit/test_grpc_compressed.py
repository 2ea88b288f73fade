"""Compressed messages of gRPC calls: unpacked at once or by workers, in order, within limits."""

import asyncio
import gzip
import struct
from contextlib import asynccontextmanager

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message, workers_are_idle
from tests.unit.grpc_requests import raw
from tests.waits import until

CODED = ("grpc-encoding", "gzip")
FRAME = 16 << 10
INTERNAL = 13
LIMIT = 1 << 20


def request(number, values):
    data = struct.pack("<f", number) * values
    return raw(("A", "FP32", [values], data)).SerializeToString()


def coded(data):
    return message(gzip.compress(data, 1), flag=1)


def send(endpoint, stream_id, data, *, end=False):
    for at in range(0, len(data), FRAME):
        last = end and at + FRAME >= len(data)
        endpoint.receive(frame(0, int(last), stream_id, data[at : at + FRAME]))


@pytest.fixture
@asynccontextmanager
async def endpoint():
    endpoint = GrpcEndpoint()
    yield endpoint
    endpoint.lose()
    # Tasks end, and give back what they hold.
    await workers_are_idle()
    await until(lambda: endpoint.connection.account.held == 0)
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0


@pytest.mark.parametrize("values", [1, 100, 50_000, 250_000])
async def test_a_compressed_message_of_a_call_is_understood(endpoint, values):
    endpoint.receive(PREFACE + head(1, "ModelInfer", CODED))
    send(endpoint, 1, coded(request(7, values)), end=True)
    await until(lambda: 1 in endpoint.statuses())
    assert endpoint.statuses() == {1: [0]}
    assert struct.pack("<f", 7) in endpoint.data(1)


async def test_messages_of_a_stream_are_taken_in_their_order(endpoint):
    sizes = [1, 200_000, 2, 100, 250_000, 3, 150_000, 1]

    endpoint.receive(PREFACE + head(1, "ModelStreamInfer", CODED))
    for number, size in enumerate(sizes):
        data = request(100 + number, size)
        # Every third comes as it is.
        send(endpoint, 1, message(data) if number % 3 == 2 else coded(data))
    endpoint.receive(frame(0, 1, 1))
    await until(lambda: 1 in endpoint.statuses())
    assert endpoint.statuses() == {1: [0]}
    answers = endpoint.data(1)
    places = [answers.find(struct.pack("<f", 100 + number)) for number in range(len(sizes))]
    assert -1 not in places
    assert places == sorted(places)
    assert endpoint.submitted == len(sizes)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize(
    "data",
    [
        lambda: gzip.compress(bytes(LIMIT + 1)),
        lambda: gzip.compress(bytes(64 << 20)),
        lambda: gzip.compress(bytes(LIMIT - 9))[:-9],
        lambda: b"no such thing",
    ],
    ids=["one byte", "bomb", "cut short", "plain"],
)
async def test_a_broken_compressed_message_ends_its_call_alone(endpoint, method, data):
    endpoint.receive(PREFACE + head(1, method, CODED) + head(3, "ModelInfer"))
    send(endpoint, 1, message(data(), flag=1), end=True)
    send(endpoint, 3, message(request(1, 1)), end=True)
    await until(lambda: len(endpoint.statuses()) == 2)
    assert endpoint.statuses() == {1: [INTERNAL], 3: [0]}
    assert endpoint.submitted == 1


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_client_that_leaves_meanwhile_leaves_nothing(endpoint, method):
    streams = range(1, 20, 2)
    endpoint.receive(PREFACE + b"".join(head(each, method, CODED) for each in streams))
    for each in streams:
        send(endpoint, each, coded(request(1, 250_000)), end=True)
    # Some by a reset, the others with the connection.
    endpoint.receive(b"".join(frame(3, 0, each, bytes(4)) for each in range(1, 10, 2)))
    await asyncio.sleep(0)
