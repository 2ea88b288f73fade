"""Content codings, undone piece by piece."""

import gzip
import random
import zlib

import pytest
from hypothesis import given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.coding import Inflater, compress

DATA = random.Random(7).randbytes(1000) + bytes(300_000) + random.Random(8).randbytes(300_000)


def coded(coding, data):
    return {b"gzip": gzip.compress, b"deflate": zlib.compress, b"identity": bytes}[coding](data)


@given(
    st.sampled_from([b"gzip", b"deflate", b"identity"]),
    st.integers(0, len(DATA)),
    st.lists(st.integers(1000, 500_000), min_size=1, max_size=5),
)
def test_pieces_are_the_whole_and_as_long_as_asked_for(coding, length, sizes):
    inflater = Inflater(coding, coded(coding, DATA[:length]), len(DATA))
    pieces = []
    while not inflater.finished:
        wanted = sizes[len(pieces) % len(sizes)]
        pieces.append(inflater.read(wanted))
        assert len(pieces[-1]) == wanted or inflater.finished
    assert b"".join(pieces) == DATA[:length]
    assert inflater.read(10) == b""


def read_all(inflater, wanted):
    while inflater.read(wanted):
        pass


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"identity"])
def test_a_body_of_the_limit_is_taken_and_a_longer_one_as_soon_as_it_is_known_to_be(coding):
    body = coded(coding, bytes(100_000))
    assert len(Inflater(coding, body, 100_000).read(100_001)) == 100_000
    inflater = Inflater(coding, body, 99_999)
    assert len(inflater.read(99_999)) == 99_999
    with pytest.raises(BridgeError, match="longer than the limit of 99999 bytes") as caught:
        inflater.read(1)
    assert caught.value.code == ErrorCode.INVALID_ARG


@given(st.sampled_from([b"gzip", b"deflate"]), st.integers(1000, 300_000), st.data())
def test_a_body_cut_short_is_told_so(coding, wanted, data):
    body = coded(coding, DATA)
    body = body[: data.draw(st.integers(0, len(body) - 1))]
    inflater = Inflater(coding, body, len(DATA))
    with pytest.raises(BridgeError, match="ends in the middle"):
        read_all(inflater, wanted)


def test_another_coding_is_not_known():
    with pytest.raises(BridgeError) as caught:
        Inflater(b"br", b"", 10)
    assert caught.value.code == ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_packed_bytes_can_be_unpacked(coding):
    packed = compress(coding, [DATA[:10], memoryview(DATA)[10:]])
    assert Inflater(coding.encode(), packed, len(DATA)).read(len(DATA) + 1) == DATA
