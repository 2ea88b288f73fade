"""Header blocks both ways: hpack is the oracle; lists are valid or malformed; blocks are remembered."""

import hpack
import pytest
from hypothesis import given, settings, strategies as st

from gpubridge.dataplane import HeaderFields
from tests.unit.http2_frames import Http2ErrorCode as Code, encode_headers
from tests.unit.test_http2_peer import (
    BLOCK,
    REQUEST,
    Recorder,
    Server,
    headers,
    settings as settings_frame,
)

METHOD, SCHEME, PATH, AUTHORITY = REQUEST


class Fields(Recorder):
    """Keeps the headers of each stream."""

    def __init__(self):
        super().__init__()
        self.headers = {}

    def on_headers(self, stream_id, headers, end):
        super().on_headers(stream_id, headers, end)
        self.headers[stream_id] = headers


def opened(*blocks, **limits):
    """A server that has got these blocks as requests, and what it has made of each."""
    server = Server(Fields(), **limits)
    for number, block in enumerate(blocks):
        server.open(2 * number + 1, block=block)
    found = [server.recorder.headers.get(2 * number + 1) for number in range(len(blocks))]
    return server, [headers and headers.fields for headers in found]


def test_a_request_says_what_it_is():
    fields = (
        *REQUEST,
        (b"te", b"trailers"),
        (b"grpc-encoding", b"gzip"),
        (b"grpc-accept-encoding", b"identity,gzip"),
        (b"grpc-timeout", b"1S"),
    )
    call = encode_headers((*REQUEST, (b"content-type", b"application/grpc")))
    server, _ = opened(encode_headers(fields), call)
    found, plain = server.recorder.headers[1], server.recorder.headers[3]
    assert found.path == b"/service/method"
    assert found.fields == fields
    assert (found.coding, found.accepted_codings, found.timeout, found.plain) == (
        b"gzip",
        b"identity,gzip",
        b"1S",
        False,
    )
    assert (plain.coding, plain.accepted_codings, plain.timeout, plain.plain) == (
        b"",
        b"",
        None,
        True,
    )


@pytest.mark.parametrize(
    "fields",
    [
        (*REQUEST[:3], (b"host", b"here")),
        (*REQUEST, (b"x", b"")),
        (*REQUEST, (b"x", b"a b\tc\xff")),
        (*REQUEST, (b"TE".lower(), b"Trailers")),
        (*REQUEST, (b"content-length", b"1"), (b"content-length", b"1")),
        ((b":method", b"CONNECT"), AUTHORITY),
    ],
)
def test_valid(fields):
    _, (found,) = opened(encode_headers(fields))
    assert found == fields


MALFORMED = {
    **{name: [b"x"] for name in (b"Upper", b"", b"a b", b"a:")},
    b":status": [b"200"],
    b"connection": [b"close"],
    b"transfer-encoding": [b"chunked"],
    b"upgrade": [b"h2c"],
    b"te": [b"gzip"],
    b"x": [b"a\0b", b"a\nb", b"a\r", b" a", b"a\t"],
    b"content-length": [b"-1", b"+1", b"", b"9" * 1000],
}


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (METHOD, SCHEME, AUTHORITY),
        (METHOD, PATH, AUTHORITY),
        (SCHEME, PATH, AUTHORITY),
        (METHOD, SCHEME, PATH),
        (*REQUEST, (b"host", b"there")),
        (METHOD, SCHEME, (b":path", b""), AUTHORITY),
        (*REQUEST, PATH),
        (METHOD, SCHEME, AUTHORITY, (b"x", b"y"), PATH),
        (METHOD, SCHEME, (b":path", b"/\n"), AUTHORITY),
        *((*REQUEST, (name, value)) for name, values in MALFORMED.items() for value in values),
        (*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")),
        ((b":method", b"CONNECT"), AUTHORITY, PATH),
    ],
)
def test_malformed(fields):
    server, found = opened(encode_headers(fields), BLOCK)
    assert found == [None, REQUEST]
    assert (3, 0, 1, Code.PROTOCOL_ERROR.to_bytes(4, "big")) in server.frames()


@pytest.mark.parametrize(
    ("fields", "valid"), [(((b"x", b"y"),), True), ((PATH,), False), (((b"X", b"y"),), False)]
)
def test_trailers_have_no_pseudo_headers(fields, valid):
    server, _ = opened(BLOCK)
    server.feed(headers(1, end=True, block=encode_headers(fields)))
    assert (server.recorder.ended == {1}) is valid
    assert (("reset", 1, Code.PROTOCOL_ERROR) in server.recorder.events) is not valid


def test_a_list_beyond_the_limit_costs_the_stream_far_beyond_it_the_connection():
    def block(size):
        return BLOCK + encode_headers([(b"x", b"y" * size)])

    server, found = opened(block(700), block(1000), header_list_bytes=1000)
    assert [bool(fields) for fields in found] == [True, False]
    assert (3, 0, 3, Code.ENHANCE_YOUR_CALM.to_bytes(4, "big")) in server.frames()
    server.open(5, block=block(4000))
    assert server.recorder.fault == Code.ENHANCE_YOUR_CALM


def test_a_repeated_block_gives_the_same_object_until_the_table_changes():
    encoder = hpack.Encoder()
    first = encoder.encode(REQUEST)
    again = encoder.encode(REQUEST)
    # One more entry in the table: the same indexes mean other fields.
    other = encoder.encode([*REQUEST, (b"new", b"field")])
    shifted = encoder.encode(REQUEST)
    assert shifted != again
    server, found = opened(first, again, again, other, shifted)
    assert found == [REQUEST, REQUEST, REQUEST, (*REQUEST, (b"new", b"field")), REQUEST]
    objects = server.recorder.headers
    assert objects[3] is objects[5]
    assert objects[5] is not objects[9]


def test_an_entry_that_takes_the_place_of_another_makes_blocks_unknown():
    table_of_one = b"\x3f\x03"  # 34 bytes: one entry of two
    _, found = opened(
        table_of_one + BLOCK + b"\x40\x01x\x01y",
        BLOCK + b"\xbe",
        BLOCK + b"\x40\x01x\x01z",
        BLOCK + b"\xbe",
    )
    assert [fields[-1] for fields in found] == [
        (b"x", b"y"),
        (b"x", b"y"),
        (b"x", b"z"),
        (b"x", b"z"),
    ]


def test_a_repeated_block_of_literals_adds_its_entries_each_time():
    literals = BLOCK + b"\x40\x01x\x01y"
    server, found = opened(
        literals,
        BLOCK + b"\x40\x01a\x01b",
        BLOCK + b"\xbf\xbe",
        literals,
        BLOCK + b"\xc0\xbf\xbe",
        BLOCK + b"\xbf\xbe",
        literals,
        BLOCK + b"\xc1\xc0\xbf\xbe",
    )
    x, a = (b"x", b"y"), (b"a", b"b")
    assert [fields[4:] for fields in found] == [
        (x,),
        (a,),
        (x, a),
        (x,),
        (x, a, x),
        (a, x),
        (x,),
        (x, a, x, x),
    ]
    objects = server.recorder.headers
    assert objects[1] is objects[7] is objects[13]


def test_a_refused_block_of_literals_adds_its_entries_too():
    literals = BLOCK + b"\x40\x01x\x01y"
    server, _ = opened(literals, literals, max_concurrent_streams=1)
    assert server.recorder.headers.keys() == {1}
    server.connection.reset(1, Code.CANCEL)
    server.open(5, block=BLOCK + b"\xbf\xbe")
    assert server.recorder.headers[5].fields[4:] == ((b"x", b"y"), (b"x", b"y"))


@pytest.mark.parametrize("change", [b"\x20", b"\x20\x3f\xe1\x1f"])
def test_a_changed_table_size_makes_blocks_unknown(change):
    server, found = opened(BLOCK + b"\x40\x01x\x01y", BLOCK + b"\xbe", change + BLOCK)
    assert found[1][-1] == (b"x", b"y")
    assert found[2] == REQUEST
    server.open(7, block=BLOCK + b"\xbe")
    assert server.recorder.fault == Code.COMPRESSION_ERROR


def test_an_entry_larger_than_the_table_empties_it():
    large = b"\x40\x01x\x7f\xf1\x1e" + b"y" * 4080
    server, found = opened(BLOCK + b"\x40\x01x\x01y", BLOCK + large)
    assert found[1][-1] == (b"x", b"y" * 4080)
    server.open(5, block=BLOCK + b"\xbe")
    assert server.recorder.fault == Code.COMPRESSION_ERROR


def test_thousands_of_different_blocks_are_read():
    blocks = [BLOCK + encode_headers([(b"x", b"%d" % number)]) for number in range(600)]
    server = Server(Fields())
    for turn in range(2):
        for number, block in enumerate(blocks):
            stream_id = 2 * (number + 600 * turn) + 1
            server.open(stream_id, end=True, block=block)
            assert server.recorder.headers[stream_id].fields[-1] == (b"x", b"%d" % number)
            server.connection.send_headers(stream_id, HeaderFields([(b":status", b"200")]), True)


NAMES = st.one_of(
    st.sampled_from([b"content-type", b"grpc-status", b"etag", b"cookie", b"x-any", b"user-agent"]),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=40)
    .map(str.encode)
    .filter(lambda name: name not in FORBIDDEN),
)
FORBIDDEN = {b"te", b"connection", b"upgrade", b"content-length"}
VALUES = st.one_of(
    st.sampled_from([b"200", b"", b"application/grpc", b"404", b"a" * 200]),
    st.binary(max_size=100).map(lambda value: bytes(b for b in value if b not in b"\0\r\n \t")),
)
LISTS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@settings(derandomize=True)
@given(
    st.lists(
        st.tuples(LISTS, st.booleans(), st.sampled_from([None, None, 0, 50, 200, 1000, 4096])),
        min_size=1,
        max_size=12,
    )
)
def test_headers_encoded_by_hpack_are_decoded(requests):
    encoder = hpack.Encoder()
    server = Server(Fields())
    for number, (fields, huffman, size) in enumerate(requests):
        if size is not None:
            encoder.header_table_size = size
        stream_id = 2 * number + 1
        server.open(stream_id, block=encoder.encode([*REQUEST, *fields], huffman=huffman))
        assert server.recorder.headers[stream_id].fields == (*REQUEST, *fields)


@settings(derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from([b"\x82", b"\x40\x01x\x01y", b"\xbe", b"\x20", b"\x3f\xe1\x1f"]),
            st.sampled_from([b"\x00\x83\xff\xff\xff\x01x", b"\x7f\x00\x01y", b"\x0f\x2f\x01z"]),
        ),
        max_size=6,
    ).map(b"".join)
)
def test_headers_that_hpack_refuses_are_refused(noise):
    """Of blocks of any bytes, those and only those that hpack decodes are decoded."""
    block = encode_headers([(b"x", b"y")]) + noise
    try:
        expected = tuple(
            (bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(block, raw=True)
        )
    except hpack.HPACKError:
        expected = None
    server = Server(Fields())
    server.open(1, end=True)
    # As trailers none of which is checked before all are decoded.
    server.open(3, block=block)
    assert (server.recorder.fault == Code.COMPRESSION_ERROR) == (expected is None)


@settings(derandomize=True)
@given(
    st.lists(
        st.tuples(LISTS, st.booleans(), st.sampled_from([None, None, 0, 60, 300, 4096, 1 << 20])),
        min_size=1,
        max_size=12,
    )
)
def test_hpack_decodes_the_encoded_headers(responses):
    decoder = hpack.Decoder()
    server = Server()
    repeated = [HeaderFields(fields, repeat=repeat) for fields, repeat, _ in responses]
    for number, (fields, _, size) in enumerate(responses * 2):
        if size is not None:
            server.feed(settings_frame((1, size)))
            decoder.max_allowed_table_size = size
        stream_id = 2 * number + 1
        server.open(stream_id, end=True)
        server.connection.send_headers(stream_id, repeated[number % len(responses)], end=True)
        (block,) = [payload for kind, _, _, payload in server.frames() if kind == 1]
        decoded = decoder.decode(block, raw=True)
        assert [(bytes(name), bytes(value)) for name, value in decoded] == fields


def test_repeated_fields_cost_a_byte_each():
    fields = HeaderFields([(b":status", b"200"), (b"content-type", b"any"), (b"x", b"y")], True)
    server = Server()
    sizes = []
    for stream_id in (1, 3, 5):
        server.open(stream_id, end=True)
        server.connection.send_headers(stream_id, fields, end=True)
        sizes += [len(payload) for _, _, _, payload in server.frames()]
    assert sizes[0] > 3
    assert sizes[1:] == [3, 3]
