"""Thousands of requests at once on one stream: each turn of the event loop takes, and gives up, a few."""

import asyncio
import gzip

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

MANY = 1000
A_TURN = 64


async def most_in_a_turn(count):
    """Wait until so many are counted; return by how many the count grew in one turn at most."""
    most, before = 0, count()
    while before < MANY:
        await asyncio.sleep(0)
        most, before = max(most, count() - before), count()
    return most


@pytest.mark.parametrize("coding", ["identity", "gzip"])
@pytest.mark.parametrize("model", ["m", "d"])
@pytest.mark.parametrize("end", [0, 1])
async def test_each_turn_takes_and_gives_up_a_few(coding, model, end):
    request = raw(("A", "FP32", [1], b"abcd"))
    request.model_name = model
    data = request.SerializeToString()
    one = message(gzip.compress(data), 1) if coding == "gzip" else message(data)
    endpoint = GrpcEndpoint(deferred=True, arena_limit=64 << 20)
    endpoint.receive(PREFACE, head(1, "ModelStreamInfer", ("grpc-encoding", coding)))
    sent = one * MANY
    frames = [frame(0, 0, 1, sent[at : at + 16384]) for at in range(0, len(sent), 16384)]
    # All is read in one turn.
    endpoint.receive(*frames, frame(0, end, 1))
    assert endpoint.submitted <= A_TURN
    assert await most_in_a_turn(lambda: endpoint.submitted) <= A_TURN
    endpoint.lose()
    assert len(endpoint.cancelled) <= A_TURN
    assert await most_in_a_turn(lambda: len(endpoint.cancelled)) <= A_TURN
    await endpoint.settle()
    endpoint.regions.close()
