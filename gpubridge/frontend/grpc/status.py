"""Statuses of gRPC calls, and the header fields that carry them."""

from __future__ import annotations

import enum
import re

from gpubridge.dataplane import HeaderFields
from gpubridge.errors import BridgeError, ErrorCode, NoMemory
from gpubridge.protocol.fields import MALFORMED

_STATUS = (b":status", b"200")
_CONTENT_TYPE = (b"content-type", b"application/grpc")

RESPONSE_FIELDS = (_STATUS, _CONTENT_TYPE, (b"grpc-accept-encoding", b"identity, deflate, gzip"))
"""Header fields of every response."""
RESPONSE_HEADERS = HeaderFields(RESPONSE_FIELDS, repeat=True)
OK_TRAILERS = HeaderFields([(b"grpc-status", b"0")], repeat=True)
"""Trailers of every successful response."""

MESSAGE_LIMIT = 6144
"""Bytes of an encoded message: clients refuse trailers of more than 8 KiB as a whole."""

_STATUS_OF_CODE = {
    ErrorCode.UNKNOWN: 2,
    ErrorCode.INTERNAL: 13,
    ErrorCode.NOT_FOUND: 5,
    ErrorCode.INVALID_ARG: 3,
    ErrorCode.UNAVAILABLE: 14,
    ErrorCode.UNSUPPORTED: 12,
    ErrorCode.ALREADY_EXISTS: 6,
    ErrorCode.CANCELLED: 1,
}

_ESCAPED = re.compile(rb"[^ -$&-~]")
_CUT = b"..."
_FLAG, _TOO_LONG, _SECOND_MESSAGE, _INCOMPLETE, _, _NO_MEMORY = range(6)


class Status(enum.IntEnum):
    """Statuses of failures at the level of gRPC."""

    OK = 0
    CANCELLED = 1
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallFailed(Exception):
    """Failure of a call at the level of gRPC; ``http`` is the status of a request that is no call."""

    def __init__(self, status: Status, message: str, http: int = 200) -> None:
        super().__init__(message)
        self.http = http
        self.status = status
        self.message = message


def failure(error: BridgeError | CallFailed, *, begun: bool) -> HeaderFields:
    """Return the header fields of a failed call.

    ``begun``: whether response headers have been sent; otherwise the fields include them.
    """
    opening = _STATUS
    if isinstance(error, CallFailed):
        number, text = int(error.status), error.message
        opening = (b":status", b"%d" % error.http)
    else:
        # One character more than is sent, so that `grpc_message` marks the cut.
        number, text = grpc_status(error.code), error.opening(MESSAGE_LIMIT + 1)
        if isinstance(error, NoMemory):
            number = int(Status.RESOURCE_EXHAUSTED)
    fields = [(b"grpc-status", b"%d" % number), (b"grpc-message", grpc_message(text))]
    return HeaderFields(fields if begun else [opening, _CONTENT_TYPE, *fields])


def framing_failure(fault: int, value: int, limit: int) -> Exception:
    """Return the failure of a call with malformed messages, or without memory for them."""
    if fault == _NO_MEMORY:
        return NoMemory()
    if fault == _TOO_LONG:
        return CallFailed(
            Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({value} vs. {limit})"
        )
    if fault == _SECOND_MESSAGE:
        # gRPC's status for a wrong number of messages.
        return CallFailed(Status.UNIMPLEMENTED, "expected one message in the request, got another")
    if fault == _FLAG:
        return CallFailed(
            Status.INTERNAL, f"expected 0 or 1 as the flag before a message, got {value}"
        )
    if fault == _INCOMPLETE:
        return CallFailed(Status.INTERNAL, "the request ends in the middle of a message")
    return CallFailed(Status.INTERNAL, MALFORMED)


def grpc_status(code: ErrorCode) -> int:
    """Return the gRPC status of an error code: Triton's table."""
    return _STATUS_OF_CODE[code]


def grpc_message(text: str) -> bytes:
    """Return the value of ``grpc-message``: UTF-8, all but printable ASCII as ``%XX``.

    A longer text than `MESSAGE_LIMIT` is cut after a whole character.
    """
    # A model's message may contain lone surrogates, which UTF-8 cannot encode.
    plain = text[:MESSAGE_LIMIT].encode(errors="replace")
    encoded = _ESCAPED.sub(_escape, plain)
    if len(encoded) <= MESSAGE_LIMIT and len(text) <= MESSAGE_LIMIT:
        return encoded
    limit = MESSAGE_LIMIT - len(_CUT)
    kept = bytearray()
    for character in plain.decode():
        piece = _ESCAPED.sub(_escape, character.encode())
        if len(kept) + len(piece) > limit:
            break
        kept += piece
    return bytes(kept) + _CUT


def _escape(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match[0][0]
