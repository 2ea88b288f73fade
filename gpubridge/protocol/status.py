"""HTTP status and body of errors."""

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
    """Return the HTTP status of an error code, as Triton does; 400 by default."""
    return _HTTP_STATUS.get(code, 400)


def error_body(error: BridgeError) -> Pieces:
    """Return the JSON body of an error, in pieces."""
    if isinstance(error, LongError):
        return error.body
    try:
        return [orjson.dumps({"error": error.told})]
    except orjson.JSONEncodeError:
        # A model's message may contain lone surrogates, which UTF-8 cannot encode.
        return [orjson.dumps({"error": error.told.encode(errors="replace").decode()})]
