"""Compressed answers: what a client accepts decides with what."""

import asyncio
import gzip
import random
import zlib

import pytest

from gpubridge.engine.workers import Workers
from gpubridge.errors import ErrorCode
from gpubridge.frontend.grpc.packing import MessageCoder, accepted_packing
from gpubridge.host_shm import Account, Budget
from gpubridge.protocol.grpc.infer_response import encode_frame

MESSAGE = bytes(range(64)) * 1000


def frames():
    whole = encode_frame(MESSAGE)
    return [[whole], [whole[:10], memoryview(whole)[10:5000], memoryview(whole)[5000:]]]


@pytest.mark.parametrize("segments", frames(), ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("accepted", "coding"),
    [(b"identity, deflate, gzip", b"gzip"), (b"identity,deflate", b"deflate"), (b"GZIP", b"gzip")],
)
def test_a_frame_comes_back_as_it_was(segments, accepted, coding):
    packing = accepted_packing(accepted, "medium")
    (frame,) = packing.frame(segments)
    assert len(frame) < len(MESSAGE) / 10
    assert frame[0] == 1
    assert int.from_bytes(frame[1:5], "big") == len(frame) - 5
    assert zlib.decompress(frame[5:], wbits=31 if coding == b"gzip" else 15) == MESSAGE


def test_levels_are_zlibs():
    sizes = {}
    for name, level in (("low", 1), ("medium", 6), ("high", 9)):
        (frame,) = accepted_packing(b"deflate", name).frame([encode_frame(MESSAGE)])
        sizes[name] = len(frame) - 5
        assert sizes[name] == len(zlib.compress(MESSAGE, level))
    assert sizes["low"] > sizes["medium"]


def test_clients_without_accepted_codings_get_identity():
    assert accepted_packing(b"identity, br", "high") is None
    assert accepted_packing(b"", "high") is None
    assert accepted_packing(b"gzip", "none") is None


def test_incompressible_messages_stay_as_they_are():
    segments = [encode_frame(b"tiny")]
    assert accepted_packing(b"gzip", "high").frame(segments) is segments


class Watched(Budget):
    """A budget that notes how much was in use at most."""

    most = 0

    def take(self, nbytes, **options):
        super().take(nbytes, **options)
        self.most = max(self.most, self.used)


@pytest.mark.parametrize(
    ("plain", "fits"), [(random.randbytes(3 << 20), True), (bytes(64 << 20), False)]
)
async def test_a_message_becomes_no_longer_than_its_connection_may_have(plain, fits):
    workers, budget = Workers(), Watched(256 << 20)
    packed = gzip.compress(plain)
    unpacked = asyncio.get_running_loop().create_future()
    coder = MessageCoder(workers, budget)
    work = coder.unpack(packed, b"gzip", 1 << 30, Account(int), unpacked.set_result)
    outcome = await unpacked
    await work
    workers.close()
    if fits:
        assert outcome == plain
    else:
        assert outcome.code == ErrorCode.UNAVAILABLE
        assert f"{len(packed)} bytes that become more than {budget.share} bytes" in outcome.message
        assert budget.most <= budget.share + (2 << 20)
    assert budget.used == 0


@pytest.mark.parametrize("limit", [1 << 20, 16 << 20])
async def test_a_long_compressed_answer_is_charged_until_it_is_sent(limit):
    workers, budget = Workers(), Budget(limit)
    packed = asyncio.get_running_loop().create_future()
    frame = [encode_frame(random.randbytes(2 << 20) + bytes(1 << 20))]
    coder = MessageCoder(workers, budget)
    assert coder.pack(accepted_packing(b"gzip", "low"), frame, packed.set_result) is None
    outcome = await packed
    workers.close()
    if limit < 2 << 20:
        assert outcome.code == ErrorCode.UNAVAILABLE
        assert "there is no memory for an answer of" in outcome.message
    else:
        assert budget.used == len(outcome[0]) > 2 << 20
    del outcome, packed
    # The event loop refers to what it has called just now.
    await asyncio.sleep(0)
    assert budget.used == 0
