"""The words for what the HTTP parser refuses: status and text by its number of the fault."""

from __future__ import annotations

import enum


class Fault(enum.IntEnum):
    """Numbers of ``http1::Fault`` in ``csrc/net/http1_head.h`` that the connection words itself."""

    BODY_TOO_LONG = 16
    CHUNKS_TOO_LONG = 17


_MALFORMED = "malformed HTTP request: "

FAULTS: tuple[tuple[int, str], ...] = (
    (400, _MALFORMED + "expected a method of at most 32 letters and a blank"),
    (400, _MALFORMED + "expected a path as the target, without blanks and controls"),
    (400, _MALFORMED + "expected HTTP/1.1 or HTTP/1.0 and a line end after the target"),
    (400, _MALFORMED + "expected HTTP/1, got the preface of HTTP/2 (gRPC has a port of its own)"),
    (400, _MALFORMED + "expected lines that end in CR LF"),
    (400, _MALFORMED + "expected a field name and a colon"),
    (400, _MALFORMED + "got a control character in the value of a field"),
    (400, _MALFORMED + "got a folded line, or a blank before the first field"),
    (431, "the request's head is longer than 65536 bytes"),
    (431, "the request's head has more than 1024 fields"),
    (400, _MALFORMED + "expected a decimal number as Content-Length"),
    (400, _MALFORMED + "got Content-Length twice"),
    (400, _MALFORMED + "expected chunked, in HTTP/1.1 and once, as Transfer-Encoding"),
    (400, _MALFORMED + "got both Content-Length and Transfer-Encoding"),
    (400, _MALFORMED + "expected the size of a chunk in hexadecimal digits"),
    (400, _MALFORMED + "expected a line end after a chunk"),
)
"""Status and text of every other fault, in the order of their numbers."""

_PLAIN = b'{"error":"expected TLS, got a request without it: use https://"}'
PLAIN_TO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_PLAIN), _PLAIN)
)
"""The answer to a request without TLS where that is spoken; nothing else is understood there."""
