"""Whatever comes as HTTP: whole requests have one answer each, in order, and nothing escapes or stays."""

import asyncio
import gzip
import json
import zlib

import hypothesis.strategies as st
from hypothesis import given

from tests.fuzz.budget import fuzzed, mutations, splits
from tests.unit.http_endpoint import BODY_LIMIT, GET, Endpoint, chunked, post

_TARGETS = st.sampled_from([b"/echo", b"/echo", b"/missing", b"/wrong", b"/full", b"*", b"/%00"])
_BODIES = st.one_of(st.binary(max_size=60), st.sampled_from([bytes(20_000), GET * 3]))
_FIELDS = st.lists(
    st.sampled_from(
        [
            b"Expect: 100-continue",
            b"Connection: close",
            b"Connection: keep-alive",
            b"Connection: Upgrade\r\nUpgrade: h2c",
            b"Accept-Encoding: gzip;q=0.5, deflate",
            b"Accept-Encoding: gzip;q=nan",
            b"Content-Encoding: gzip",
            b"Content-Encoding: deflate",
            b"Content-Encoding: br",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
            b"Content-Length: 5",
            b"Content-Length: 99999999999999999999",
            b"Inference-Header-Content-Length: -1",
            b"X: " + b"x" * 3000,
        ]
    ),
    max_size=3,
)


@st.composite
def _requests(draw):
    kind = draw(st.sampled_from(["get", "post", "post", "chunked", "gzip", "bomb", "cut", "head"]))
    target, body, fields = draw(_TARGETS), draw(_BODIES), draw(_FIELDS)
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    size = draw(st.integers(1, 3000))
    return {
        "get": b"\r\n".join([b"GET %b HTTP/1.1" % target, *fields, b"", b""]),
        "head": b"HEAD /echo HTTP/1.1\r\n\r\n",
        "post": post(body, target, *fields, version=version),
        "chunked": chunked(body, size, target, *fields),
        "gzip": post(gzip.compress(body, mtime=0), target, b"Content-Encoding: gzip"),
        "bomb": post(zlib.compress(bytes(BODY_LIMIT + 1)), target, b"Content-Encoding: deflate"),
        "cut": post(zlib.compress(body)[:-1], target, b"Content-Encoding: deflate"),
    }[kind]


_STATUSES = {200, 400, 404, 413, 431, 501, 503}
"""Statuses of malformed, unknown, too long and unserved requests; none of a fault of the server."""

_STREAMS = st.lists(_requests(), max_size=5).map(b"".join)
_TRAFFIC = st.one_of(_STREAMS, mutations(_STREAMS), mutations(_STREAMS, 1), st.binary(max_size=80))


def _proper(endpoint):
    """Check that answers are in the order of their requests, each with its own body, or an error."""
    answers = endpoint.answers()
    assert {status for status, _ in answers} <= _STATUSES
    echoed = [handler.body for handler in endpoint.handlers if "completed" in handler.ends]
    given = [body for status, body in answers if status == 200]
    # The connection may be gone before the last ones.
    assert given == echoed[: len(given)]
    assert all(json.loads(body)["error"] for status, body in answers if status != 200)
    return answers


async def _converse(pieces, deferred, ends):
    endpoint = Endpoint(deferred=deferred)
    neighbour = Endpoint(beside=endpoint)
    for piece in pieces:
        endpoint.receive(piece)
        await asyncio.sleep(0)
    if ends and not endpoint.undelivered:
        # The client says no more; what it has asked is answered, then there is nothing to wait for.
        endpoint.end()
    for _ in range(200):
        # What waits is answered, in any order: here from the last on.
        due = [h for h in endpoint.handlers if h.exchange is not None and "answered" not in h.ends]
        if deferred and not due:
            break
        for handler in reversed(due if deferred else []):
            handler.ends.append("answered")
            handler.answer()
        endpoint.receive()
        await asyncio.sleep(0)
        if not deferred:
            break
    answers = _proper(endpoint)
    if ends and not endpoint.undelivered:
        assert endpoint.transport.state == "closed"
    endpoint.lose()
    assert endpoint.connections == {neighbour.connection}
    for handler in endpoint.handlers:
        told = [end for end in handler.ends if end != "answered"]
        # Each is told how it ends, and nothing after that but that no client waits.
        assert told.count("completed") <= 1
        assert told.count("aborted") <= 1
        assert told
    assert endpoint.connection._state.open == 0
    # Another client has noticed nothing.
    neighbour.receive(post(b"good") + GET)
    assert neighbour.answers() == [(200, b"good"), (200, b"")]
    neighbour.lose()
    assert not endpoint.connections
    return answers


@fuzzed(5)
@given(st.data(), st.booleans(), st.booleans())
def test_no_traffic_of_a_connection_escapes_or_leaves_a_request_behind(data, deferred, ends):
    """`_converse` asserts what must hold during the connection and after it."""
    pieces = data.draw(splits(data.draw(_TRAFFIC)))
    asyncio.run(_converse(pieces, deferred, ends))


@fuzzed(2)
@given(st.data(), st.booleans())
def test_split_traffic_changes_no_answer(data, deferred):
    traffic = data.draw(_TRAFFIC)
    whole = asyncio.run(_converse([traffic], deferred, False))
    assert asyncio.run(_converse(data.draw(splits(traffic)), deferred, False)) == whole
