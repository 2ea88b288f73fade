"""Errors over HTTP."""

from __future__ import annotations

import orjson

from gpubridge.errors import BridgeError, ErrorCode, LongError, Pieces

_HTTP_STATUS = {
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
}


def http_status(code: ErrorCode) -> int:
    """Return the HTTP status of an error code: Triton's table, everything else is 400."""
    return _HTTP_STATUS.get(code, 400)


def error_body(error: BridgeError) -> Pieces:
    """Return the JSON body that tells an error, in pieces."""
    if isinstance(error, LongError):
        return error.body
    try:
        return [orjson.dumps({"error": error.message})]
    except orjson.JSONEncodeError:
        # A model's message may hold lone surrogates, which are no Unicode text.
        return [orjson.dumps({"error": error.message.encode(errors="replace").decode()})]
