"""Errors over gRPC: a status number and a percent-encoded message, both in trailers."""

from __future__ import annotations

import re

from gpubridge.errors import ErrorCode

MESSAGE_LIMIT = 6144
"""Bytes of an encoded message: clients refuse trailers of more than 8 KiB as a whole."""

_STATUS = {
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


def grpc_status(code: ErrorCode) -> int:
    """Return the gRPC status of an error code: Triton's table."""
    return _STATUS[code]


def grpc_message(text: str) -> bytes:
    """Return the value of ``grpc-message``: UTF-8, all but printable ASCII as ``%XX``.

    A longer one than `MESSAGE_LIMIT` is cut off after a whole character.
    """
    # A model's message may hold lone surrogates, which are no Unicode text.
    plain = text[:MESSAGE_LIMIT].encode(errors="replace")
    encoded = _ESCAPED.sub(_escape, plain)
    if len(encoded) <= MESSAGE_LIMIT and len(text) <= MESSAGE_LIMIT:
        return encoded
    room = MESSAGE_LIMIT - len(_CUT)
    kept = bytearray()
    for character in plain.decode():
        piece = _ESCAPED.sub(_escape, character.encode())
        if len(kept) + len(piece) > room:
            break
        kept += piece
    return bytes(kept) + _CUT


def _escape(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match[0][0]
