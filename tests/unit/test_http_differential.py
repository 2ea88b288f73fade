"""The HTTP/1 parser beside httptools: where both take a request, it is the same one.

What only one of them takes has a reason in one of the two lists here.
"""

import httptools
import pytest
from hypothesis import given, strategies as st

from gpubridge.dataplane import (
    HttpConnectionState,
    HttpOrigins,
    IdleConnections,
    InferTargets,
    RequestCounts,
)
from gpubridge.frontend.http.message import FAULTS
from tests.fuzz.budget import fuzzed, mutations, splits

NAMES = (b"host", b"x", b"content-encoding", b"accept-encoding", b"inference-header-content-length")
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = b"5\r\nhello\r\n0\r\n\r\n"

STRICTER = {
    "two blanks before the target": (b"POST  / HTTP/1.1\r\n\r\n", "a path as the target"),
    "two blanks after it": (b"POST /  HTTP/1.1\r\n\r\n", "expected HTTP/1.1"),
    "another protocol": (b"POST / RTSP/1.0\r\n\r\n", "expected HTTP/1.1"),
    "a target that is none": (b"POST *x HTTP/1.1\r\n\r\n", "a path as the target"),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + HELLO, "as Transfer-Encoding"),
    "a coding besides chunks": (
        CHUNKED.replace(b"chunked", b"gzip, chunked") + HELLO,
        "as Transfer-Encoding",
    ),
    "a chunk's size of more than 15 digits": (CHUNKED + b"0" * 15 + HELLO, "the size of a chunk"),
}
"""Requests that httptools takes and we refuse, with words of the refusal."""

LENIENT = {
    "methods of any name": (b"BREW / HTTP/1.1\r\n\r\n", "Invalid method"),
    "methods that begin as another": (b"GETPOST / HTTP/1.1\r\n\r\n", "space after method"),
    "chunk extensions of any form": (CHUNKED + HELLO.replace(b"5", b"5;a b"), "chunk ext"),
    "URLs of any host": (b"GET http://<x>/ HTTP/1.1\r\n\r\n", "url"),
}
"""Requests that httptools refuses, with words of its refusal, and we take."""


class Requests:
    """The owner of a connection: notes the requests that come, and what is refused."""

    def __init__(self):
        self.requests = []
        self.fault = None
        self.state = HttpConnectionState(
            self,
            bytearray(4096),
            *(IdleConnections(), InferTargets(), HttpOrigins(), RequestCounts(1)),
            1 << 30,
        )
        self.state.start(lambda data: None, lambda parts: None)

    def refuse_asker(self, exchange, by_host):
        raise AssertionError

    def take(self, exchange):
        exchange.handler = self
        self.memory = memoryview(bytearray(exchange.length or 0))
        if exchange.length:
            exchange.receive_into(self.memory, self.grow(exchange, 4096))
        if exchange.whole:
            self.complete(exchange, exchange.length)

    def grow(self, exchange, arrived):
        return arrived + 1000

    def complete(self, exchange, copied):
        self.note(exchange, bytes(self.memory))

    def collect(self, exchange, body):
        self.note(exchange, bytes(body))

    def note(self, exchange, body):
        fields = {name: exchange.field(name) for name in NAMES}
        self.requests.append((exchange.method, exchange.target, fields, body))
        exchange.respond(200, b"", b"", plain=True)

    def refuse(self, fault, exchange):
        self.fault = FAULTS[fault][1] if fault < len(FAULTS) else "too long"
        self.state.refuse(ValueError(), 400)

    def pack(self, *answer):
        raise AssertionError("answers are plain")

    def failure(self, error, status, _):
        return 400, [b""]

    def changed(self, close):
        if close:
            self.state.close()

    def check_unread(self):
        """Its answers are read at once."""

    def charge(self, nbytes):
        return nbytes

    def abort(self):
        pass


class Oracle:
    """The same by httptools; a request that ends its connection is the last."""

    def __init__(self):
        self.requests = []
        self.fault = None
        self.done = False
        self.parser = httptools.HttpRequestParser(self)

    def feed(self, data):
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.done:
                self.fault = str(error)

    def on_message_begin(self):
        self.target, self.fields, self.body = b"", {}, b""
        self.headed = self.closes = False

    def on_url(self, url):
        self.target += url

    def on_header(self, name, value):
        # Those of a trailer mean nothing.
        if not self.headed:
            self.fields[name.lower()] = value.strip(b" \t")
            if name.lower() == b"connection" and b"close" in value.lower():
                # Also where keep-alive is said, too.
                self.closes = True

    def on_headers_complete(self):
        self.headed = True

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        if not self.done:
            fields = {name: self.fields.get(name) for name in NAMES}
            self.requests.append((self.parser.get_method(), self.target, fields, self.body))
            self.done = self.closes or not self.parser.should_keep_alive()


def read(pieces):
    """Return the requests in the pieces, and why no more could be read."""
    owner = Requests()
    for piece in pieces:
        at = 0
        while at < len(piece):
            buffer = memoryview(owner.state.get_buffer(-1))
            taken = min(len(buffer), len(piece) - at)
            buffer[:taken] = piece[at : at + taken]
            owner.state.buffer_updated(taken)
            at += taken
    owner.state.lose()
    return owner.requests, owner.fault


BODY = b"POST / HTTP/1.1\r\n\r\n0\r\n"
LENGTHS = [b" 0", b" 5", b" 005", b" +5", b" 5, 5", b" 0x5", b"", b" 5 "]
ENCODINGS = [
    b" chunked",
    b" Chunked ",
    b" gzip, chunked",
    b" chunked, identity",
    b"\x0bchunked",
    b" x",
]
FIELDS = st.sampled_from(
    [
        b"Host: x",
        b"hOST:\t x \t",
        b"X:",
        b"X: a\x80\xff b",
        b"X : y",
        b"X: a\r\n b",
        b"X: a\x00",
        b"X: y\nX: z",
        b": x",
        b"nocolon",
        b"Connection: close",
        b"Connection: Keep-Alive, x",
        *(b"Content-Length:" + value for value in LENGTHS),
        *(b"Transfer-Encoding:" + value for value in ENCODINGS),
        b"Content-Encoding: identity",
        b"Accept-Encoding: gzip",
        b"Inference-Header-Content-Length: 12",
        b"Expect: 100-continue",
    ]
)
LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1",
        b"POST /v2/models/m/infer HTTP/1.1",
        b"POST /a%20b?c=d#e HTTP/1.1",
        b"POST http://host:80/path HTTP/1.1",
        b"OPTIONS * HTTP/1.1",
        b"POST / HTTP/1.0",
        b"POST / HTTP/2.0",
        b"POST / HTTP/1.2",
        b"POST /",
        b"POST  / HTTP/1.1",
        b"POST /  HTTP/1.1",
        b"POST / HTTP/1.1 ",
        b"POST /\x80 HTTP/1.1",
        b"POST /\t HTTP/1.1",
        b"POST x HTTP/1.1",
        b"BREW / HTTP/1.1",
        b"get / HTTP/1.1",
        b"\r\nGET / HTTP/1.1",
    ]
)
CHUNKS = st.sampled_from(
    [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
        b'5;a="b"\r\nhello\r\n0\r\n\r\n',
        b"0005\r\nhello\r\n000\r\n\r\n",
        b"F\r\n" + BODY[:15] + b"\r\nf\r\n" + BODY[:15] + b"\r\n0\r\nContent-Length: 9\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhello0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"10000000000000000000000005\r\nhello\r\n0\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
    ]
)


@st.composite
def messages(draw):
    """A request, valid more often than not."""
    line = draw(st.one_of(st.just(b"POST /p HTTP/1.1"), LINES))
    kind = draw(st.sampled_from(["none", "length", "chunked", "any"]))
    body = draw(st.sampled_from([b"", b"hello", BODY]))
    fields = draw(st.lists(FIELDS, max_size=2 if kind == "any" else 1))
    if kind == "length":
        fields.append(b"Content-Length: %d" % len(body))
    elif kind == "chunked":
        fields.append(b"Transfer-Encoding: chunked")
        body = draw(CHUNKS)
    return b"\r\n".join([line, *draw(st.permutations(fields)), b"", body])


STREAMS = st.lists(messages(), min_size=1, max_size=4).map(b"".join)


@fuzzed(4)
@given(st.data(), st.one_of(STREAMS, STREAMS, mutations(STREAMS, 2), mutations(STREAMS, 5)))
def test_requests_that_both_accept_are_equal(data, stream):
    oracle = Oracle()
    oracle.feed(stream)
    requests, fault = read(data.draw(splits(stream)))
    both = min(len(requests), len(oracle.requests))
    assert requests[:both] == oracle.requests[:both]
    if len(requests) < len(oracle.requests):
        assert fault is not None
        assert any(words in fault for _, words in STRICTER.values()), fault
    if len(requests) > len(oracle.requests):
        assert oracle.fault is not None
        assert any(words in oracle.fault for _, words in LENIENT.values()), oracle.fault


@pytest.mark.parametrize("reason", STRICTER)
def test_requests_that_only_gpubridge_refuses(reason):
    stream, words = STRICTER[reason]
    oracle = Oracle()
    oracle.feed(stream)
    assert (len(oracle.requests), oracle.fault) == (1, None)
    requests, fault = read([stream])
    assert requests == []
    assert words in fault


@pytest.mark.parametrize("reason", LENIENT)
def test_requests_that_only_gpubridge_accepts(reason):
    stream, words = LENIENT[reason]
    oracle = Oracle()
    oracle.feed(stream)
    assert oracle.requests == []
    assert words in oracle.fault
    requests, fault = read([stream])
    assert (len(requests), fault) == (1, None)
