"""Header lists: valid or malformed, remembered while they mean the same, and made once."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings, strategies as st

from gpubridge.frontend.http2.compression import HeaderDecoder, encode_headers
from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.headers import MalformedHeaders, RequestHeaders, check_trailers
from gpubridge.frontend.http2.limits import Http2Limits
from tests.unit.test_http2_peer import BLOCK, REQUEST

METHOD, SCHEME, PATH, AUTHORITY = REQUEST


def test_a_request_says_what_it_is():
    headers = RequestHeaders((*REQUEST, (b"te", b"trailers"), (b"content-length", b"12")))
    assert headers.method == b"POST"
    assert headers.path == b"/service/method"
    assert headers.authority == b"here"
    assert headers.content_length == 12


@pytest.mark.parametrize(
    "fields",
    [
        REQUEST[:3],
        (*REQUEST, (b"x", b"")),
        (*REQUEST, (b"x", b"a b\tc\xff")),
        (*REQUEST, (b"TE".lower(), b"Trailers")),
        (*REQUEST, (b"content-length", b"1"), (b"content-length", b"1")),
        ((b":method", b"CONNECT"), AUTHORITY),
    ],
)
def test_valid(fields):
    assert RequestHeaders(fields).fields == fields


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (METHOD, SCHEME),
        (METHOD, PATH),
        (SCHEME, PATH),
        (METHOD, SCHEME, (b":path", b"")),
        (*REQUEST, PATH),
        (*REQUEST, (b":status", b"200")),
        (METHOD, SCHEME, (b"x", b"y"), PATH),
        (*REQUEST, (b"Upper", b"x")),
        (*REQUEST, (b"", b"x")),
        (*REQUEST, (b"a b", b"x")),
        (*REQUEST, (b"a:", b"x")),
        (*REQUEST, (b"x", b"a\0b")),
        (*REQUEST, (b"x", b"a\nb")),
        (*REQUEST, (b"x", b"a\r")),
        (*REQUEST, (b"x", b" a")),
        (*REQUEST, (b"x", b"a\t")),
        (METHOD, SCHEME, (b":path", b"/\n")),
        (*REQUEST, (b"connection", b"close")),
        (*REQUEST, (b"transfer-encoding", b"chunked")),
        (*REQUEST, (b"upgrade", b"h2c")),
        (*REQUEST, (b"te", b"gzip")),
        (*REQUEST, (b"content-length", b"-1")),
        (*REQUEST, (b"content-length", b"")),
        (*REQUEST, (b"content-length", b"9" * 1000)),
        (*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")),
        ((b":method", b"CONNECT"), AUTHORITY, PATH),
    ],
)
def test_malformed(fields):
    with pytest.raises(MalformedHeaders, match="expected"):
        RequestHeaders(fields)


def test_trailers_have_no_pseudo_headers():
    check_trailers(((b"x", b"y"),))
    with pytest.raises(MalformedHeaders):
        check_trailers((PATH,))


def test_a_repeated_block_gives_the_same_object_until_the_table_changes():
    encoder, decoder = hpack.Encoder(), HeaderDecoder(Http2Limits())
    first = decoder.request(1, encoder.encode(REQUEST))
    block = encoder.encode(REQUEST)
    assert not decoder.known
    second = decoder.request(3, block)
    assert second.fields == first.fields
    assert decoder.known == {block: second}
    # One more entry in the table: the same indexes mean other fields.
    other = encoder.encode([*REQUEST, (b"new", b"field")])
    assert decoder.request(5, other).fields[-1] == (b"new", b"field")
    assert not decoder.known
    shifted = encoder.encode(REQUEST)
    assert shifted != block
    assert decoder.request(7, shifted).fields == first.fields


def test_an_entry_that_takes_the_place_of_another_makes_blocks_unknown():
    decoder = HeaderDecoder(Http2Limits())
    table_of_one = b"\x3f\x03"  # 34 bytes: one entry of two
    decoder.request(1, table_of_one + BLOCK + b"\x40\x01x\x01y")
    assert decoder.request(3, BLOCK + b"\xbe").fields[-1] == (b"x", b"y")
    assert decoder.known
    decoder.request(5, BLOCK + b"\x40\x01x\x01z")
    assert not decoder.known
    assert decoder.request(7, BLOCK + b"\xbe").fields[-1] == (b"x", b"z")


@pytest.mark.parametrize("change", [b"\x20", b"\x20\x3f\xe1\x1f"])
def test_a_changed_table_size_makes_blocks_unknown(change):
    decoder = HeaderDecoder(Http2Limits())
    decoder.request(1, BLOCK + b"\x40\x01x\x01y")
    decoder.request(3, BLOCK + b"\xbe")
    assert decoder.known
    decoder.request(5, change + BLOCK)
    assert not decoder.known
    with pytest.raises(ConnectionFault):
        decoder.request(7, BLOCK + b"\xbe")


def test_what_is_remembered_is_bounded():
    decoder = HeaderDecoder(Http2Limits())
    for number in range(2000):
        decoder.request(1, BLOCK + encode_headers([(b"x", b"%d" % number)]))
    decoder.request(1, BLOCK + encode_headers([(b"x", b"y" * 5000)]))
    assert len(decoder.known) <= 256
    assert max(map(len, decoder.known)) <= 1024


def test_a_list_beyond_the_limit_costs_the_stream_far_beyond_it_the_connection():
    decoder = HeaderDecoder(Http2Limits(header_list_bytes=1000))
    decoder.request(1, BLOCK + encode_headers([(b"x", b"y" * 700)]))
    with pytest.raises(StreamFault) as reset:
        decoder.request(3, BLOCK + encode_headers([(b"x", b"y" * 1000)]))
    with pytest.raises(ConnectionFault) as ended:
        decoder.request(5, BLOCK + encode_headers([(b"x", b"y" * 4000)]))
    assert reset.value.code == ended.value.code == Http2ErrorCode.ENHANCE_YOUR_CALM


NAMES = st.one_of(
    st.sampled_from([b":status", b"content-type", b"grpc-status", b"etag"]),
    st.binary(min_size=1, max_size=300),
)
VALUES = st.one_of(st.sampled_from([b"200", b"", b"404"]), st.binary(max_size=300))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
def test_what_we_encode_is_decoded_without_a_table(fields):
    decoder = hpack.Decoder()
    block = encode_headers(fields)
    for _ in range(2):
        assert [tuple(field) for field in decoder.decode(block, raw=True)] == fields
    assert not decoder.header_table.dynamic_entries
