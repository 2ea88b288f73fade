"""HTTP itself: how bodies are framed and compressed, how connections live and end, malformed requests."""

import gzip
import zlib
from typing import Any

from tests.conformance import deliberate as why
from tests.conformance.http_case import ADD_SUB, Case, get, infer, with_connection

INFER = "/v2/models/add_sub/infer"
LENGTH = len(ADD_SUB)
ACCEPTING_GZIP = (("Accept-Encoding", "gzip"),)
SHORT = 1.0  # patience where the peer is known to stay silent


def framed(name: str, *headers: tuple[str, str], body: bytes = ADD_SUB, **fields: Any) -> Case:
    """An add_sub request with these headers, watching the connection."""
    return with_connection(Case(f"framing: {name}", "POST", INFER, headers, body, **fields))


def pieces(name: str, *parts: bytes, **fields: Any) -> Case:
    """Bytes sent as they are, one piece after the other."""
    return with_connection(Case(f"wire: {name}", raw=parts, **fields))


def head(*headers: str, line: str = f"POST {INFER} HTTP/1.1") -> bytes:
    return "".join(f"{part}\r\n" for part in (line, "Host: localhost", *headers, "")).encode(
        "latin-1"
    )


def live(*headers: str, version: str = "HTTP/1.1") -> bytes:
    return head(*headers, line=f"GET /v2/health/live {version}")


def length(value: object) -> tuple[str, str]:
    return "Content-Length", str(value)


def coded(name: str, coding: str, body: bytes, **fields: Any) -> Case:
    headers = (("Content-Encoding", coding),)
    return infer(f"coding: {name}", "add_sub", body, headers=headers, **fields)


LONG_ID = b'{"id":"%b",' % (b"x" * 1024) + ADD_SUB[1:]
"""Has an answer that is worth compressing."""


def accepting(*codings: str) -> list[Case]:
    return [
        infer(f"accept: {coding}", "add_sub", LONG_ID, headers=(("Accept-Encoding", coding),))
        for coding in codings
    ]


GZIPPED = gzip.compress(ADD_SUB, mtime=0)
CHUNKED = ("Transfer-Encoding", "chunked")
ONE_CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (LENGTH, ADD_SUB)
TWO_CHUNKS = b"10\r\n%s\r\n%X\r\n%s\r\n0\r\n\r\n" % (ADD_SUB[:16], LENGTH - 16, ADD_SUB[16:])
WHOLE = head(f"Content-Length: {LENGTH}") + ADD_SUB

FRAMING = [
    framed("keep-alive is the default"),
    framed("Connection: close", ("Connection", "close")),
    framed("Connection: close in capitals", ("Connection", "CLOSE"), differs=why.CLOSE_IN_CAPITALS),
    framed("Connection: keep-alive", ("Connection", "keep-alive")),
    framed("HTTP/1.0", version="HTTP/1.0"),
    framed("HTTP/1.0 keep-alive", ("Connection", "keep-alive"), version="HTTP/1.0"),
    framed("error with Connection: close", ("Connection", "close"), body=b"junk"),
    framed("content type of a form", ("Content-Type", "application/x-www-form-urlencoded")),
    framed("one chunk", CHUNKED, body=ONE_CHUNK),
    framed("two chunks", CHUNKED, body=TWO_CHUNKS),
    framed(
        "chunk extension",
        CHUNKED,
        body=ONE_CHUNK.replace(b"\r\n", b";name=value\r\n", 1),
        differs=why.CHUNK_EXTENSION,
    ),
    framed("trailer", CHUNKED, body=ONE_CHUNK[:-2] + b"X-Trailer: x\r\n\r\n"),
    framed("chunk size junk", CHUNKED, body=b"zz\r\nhello\r\n0\r\n\r\n", differs=why.FRAMING),
    framed("chunk without end", CHUNKED, body=ONE_CHUNK[:-5], half_close=True),
    framed(
        "chunked and gzip",
        CHUNKED,
        ("Content-Encoding", "gzip"),
        body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(GZIPPED), GZIPPED),
    ),
    framed("chunked and a length", CHUNKED, length("5"), body=ONE_CHUNK, differs=why.FRAMING),
    framed("length too large, then end", length(LENGTH + 10), half_close=True),
    framed("length too large, waiting", length(LENGTH + 10), patience=SHORT),
    framed("length too small", length(LENGTH - 10)),
    framed("length junk", length("abc"), patience=SHORT, differs=why.FRAMING),
    framed("length negative", length("-5"), patience=SHORT, differs=why.FRAMING),
    framed("length huge", length("99999999999999"), patience=SHORT, differs=why.LIMITS),
    framed("lengths that differ", length(LENGTH), length("3"), differs=why.FRAMING),
    framed("length twice", length(LENGTH), length(LENGTH), differs=why.FRAMING),
    framed("no length on POST", body=b""),
    framed("Expect: 100-continue", ("Expect", "100-continue")),
    framed("Expect: something else", ("Expect", "bananas"), differs=why.EXPECTATION),
]

CODINGS = [
    coded("gzip", "gzip", GZIPPED),
    coded("deflate", "deflate", zlib.compress(ADD_SUB)),
    coded(
        "deflate without zlib header",
        "deflate",
        zlib.compress(ADD_SUB)[2:-4],
        differs=why.BAD_COMPRESSION,
    ),
    coded("GZIP in capitals", "GZIP", GZIPPED, differs=why.CODING_IN_CAPITALS),
    coded("identity", "identity", ADD_SUB),
    coded("empty", "", ADD_SUB),
    coded("br", "br", ADD_SUB),
    coded("two codings", "gzip, deflate", GZIPPED),
    coded("gzip announced, plain sent", "gzip", ADD_SUB, differs=why.BAD_COMPRESSION),
    coded("deflate announced, plain sent", "deflate", ADD_SUB, differs=why.BAD_COMPRESSION),
    coded("gzip cut short", "gzip", GZIPPED[:-12], differs=why.BAD_COMPRESSION),
    coded("gzip of nothing", "gzip", gzip.compress(b"", mtime=0)),
    coded("gzip of junk", "gzip", gzip.compress(b"junk", mtime=0)),
    coded(
        "gzip, two members",
        "gzip",
        gzip.compress(ADD_SUB[:50], mtime=0) + gzip.compress(ADD_SUB[50:], mtime=0),
    ),
    *accepting(
        "gzip",
        "deflate",
        "gzip, deflate",
        "deflate, gzip",
        "deflate;q=0.5, gzip;q=1.0",
        "gzip;q=0.5, deflate;q=1.0",
        "gzip;q=0",
        "identity",
        "br",
        "*",
        "",
        "gzip;q=junk",
    ),
    infer("accept: error is not compressed", "add_sub", b"junk", headers=ACCEPTING_GZIP),
    infer("accept: short answer", "add_sub", ADD_SUB, headers=ACCEPTING_GZIP),
    infer(
        "accept: short answer, several codings",
        "add_sub",
        ADD_SUB,
        headers=(("Accept-Encoding", "gzip, deflate"),),
        differs=why.SHORT_ANSWERS,
    ),
    infer(
        "accept: binary output",
        "add_sub",
        LONG_ID[:-1] + b',"parameters":{"binary_data_output":true}}',
        headers=ACCEPTING_GZIP,
    ),
    get("accept: metadata", "/v2/models/add_sub", headers=ACCEPTING_GZIP),
]

WIRE = [
    pieces(
        "Expect, body sent later",
        head("Expect: 100-continue", f"Content-Length: {LENGTH}"),
        ADD_SUB,
    ),
    pieces("body in two pieces", WHOLE[:-50], WHOLE[-50:]),
    pieces("head in two pieces", WHOLE[:40], WHOLE[40:]),
    pieces("byte by byte", *(bytes([byte]) for byte in live()), differs=why.BYTE_BY_BYTE),
    pieces("three requests in one go", WHOLE * 3, responses=3),
    pieces(
        "three GETs in one go", live() * 3, responses=3, patience=SHORT, differs=why.PIPELINED_GETS
    ),
    pieces("infer, then health", WHOLE + live(), responses=2, patience=SHORT),
    pieces("error, then infer", head("Content-Length: 4") + b"junk", WHOLE, responses=2),
    pieces(
        "unknown model, then infer",
        head("Content-Length: 4", line="POST /v2/models/nope/infer HTTP/1.1") + b"junk",
        WHOLE,
        responses=2,
    ),
    pieces("unknown path, then health", head(line="GET /nope HTTP/1.1"), live(), responses=2),
    pieces("no Host", WHOLE.replace(b"Host: localhost\r\n", b"")),
    pieces("GET with a body", live("Content-Length: 5") + b"hello", live(), responses=2),
    pieces("header without colon", live("nocolon"), differs=why.MALFORMED),
    pieces("blank before the colon", live("X-Blank : x"), differs=why.MALFORMED),
    pieces("folded header", live("X-A: a\r\n b"), differs=why.MALFORMED),
    pieces("five hundred headers", live(*(f"X-{n}: {n}" for n in range(500)))),
    pieces("header of 100,000 bytes", live("X-Long: " + "a" * 100_000), differs=why.LIMITS),
    pieces(
        "path of 20,000 bytes", head(line=f"GET /v2/{'a' * 20_000} HTTP/1.1"), differs=why.LIMITS
    ),
    pieces("bare line feeds", live().replace(b"\r\n", b"\n"), differs=why.MALFORMED),
    pieces("empty line first", b"\r\n" + live(), patience=SHORT, differs=why.EMPTY_LINE),
    pieces("HTTP/1.0 health", live(version="HTTP/1.0")),
    pieces("HTTP/2.0 in the request line", live(version="HTTP/2.0"), differs=why.OLD_OR_NEW_HTTP),
    pieces("HTTP/0.9", b"GET /v2/health/live\r\n\r\n", patience=SHORT, differs=why.OLD_OR_NEW_HTTP),
    pieces(
        "HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", patience=SHORT, differs=why.MALFORMED
    ),
    pieces("upgrade to h2c", live("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c")),
    pieces("binary garbage", b"\x00\x01\x02garbage\r\n\r\n", patience=SHORT, differs=why.MALFORMED),
    pieces("TLS hello", b"\x16\x03\x01\x00\x05hello", patience=SHORT, differs=why.MALFORMED),
    pieces("nothing, then end", b"", half_close=True),
    pieces("half a head, then end", WHOLE[:40], half_close=True),
]

CASES: list[Case] = [*FRAMING, *CODINGS, *WIRE]
