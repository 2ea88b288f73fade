"""Unary calls take one message: a second one ends the call, and nothing is kept of it."""

import asyncio

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

REQUEST = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())
LARGE = message(raw(("A", "FP32", [30_000], b"abcd" * 30_000)).SerializeToString())
UNIMPLEMENTED, INTERNAL = 12, 13


async def converse(*pieces, deferred=True):
    """Send pieces one after the other; returns the statuses and what became of the requests."""
    endpoint = GrpcEndpoint(deferred=deferred)
    endpoint.receive(PREFACE + head(1, "ModelInfer"))
    for piece in pieces:
        endpoint.receive(piece)
        await asyncio.sleep(0)
    found = endpoint.statuses(), endpoint.submitted, len(endpoint.cancelled)
    await endpoint.settle()
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    return found


@pytest.mark.parametrize("sent", [REQUEST, LARGE], ids=["small", "large"])
async def test_a_second_message_ends_the_call_and_cancels_its_request(sent):
    assert await converse(frame(0, 0, 1, sent), frame(0, 0, 1, b"\0")) == (
        {1: [UNIMPLEMENTED]},
        1,
        1,
    )
    assert await converse(frame(0, 0, 1, sent)) == ({}, 1, 0)


async def test_two_messages_at_once_are_no_request():
    assert await converse(frame(0, 1, 1, REQUEST * 2)) == ({1: [UNIMPLEMENTED]}, 0, 0)


async def test_bytes_after_the_message_are_not_kept():
    flood = frame(0, 0, 1, message(b"") * 3000)
    statuses, submitted, _ = await converse(frame(0, 0, 1, REQUEST), *[flood] * 50)
    assert (statuses, submitted) == ({1: [UNIMPLEMENTED]}, 1)


async def test_an_answer_needs_no_end_of_the_request():
    assert await converse(frame(0, 0, 1, REQUEST), deferred=False) == ({1: [0]}, 1, 0)


@pytest.mark.parametrize("sent", [b"", b"\0\0", REQUEST[:-1], LARGE[:-1]])
async def test_an_end_without_a_whole_message_is_an_error(sent):
    assert await converse(frame(0, 1, 1, sent)) == ({1: [INTERNAL]}, 0, 0)
