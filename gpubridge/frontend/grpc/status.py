"""Ends of calls: the status numbers of gRPC, and the header fields that carry them."""

from __future__ import annotations

import enum

from gpubridge.dataplane import HeaderFields
from gpubridge.protocol.grpc.status import MESSAGE_LIMIT, grpc_message, grpc_status
from gpubridge.telemetry.logs import request_error

_STATUS = (b":status", b"200")
_CONTENT_TYPE = (b"content-type", b"application/grpc")

RESPONSE_FIELDS = (_STATUS, _CONTENT_TYPE, (b"grpc-accept-encoding", b"identity, deflate, gzip"))
"""The fields that every response begins with."""
RESPONSE_HEADERS = HeaderFields(RESPONSE_FIELDS, repeat=True)
OK_TRAILERS = HeaderFields([(b"grpc-status", b"0")], repeat=True)
"""The fields that every response ends with that is no failure."""


class Status(enum.IntEnum):
    """The statuses that calls get for reasons of gRPC's own."""

    OK = 0
    CANCELLED = 1
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallFailed(Exception):
    """Ends a call with a status of gRPC's own."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def failure(error: Exception, *, begun: bool) -> HeaderFields:
    """Return the fields that end a call with an error.

    ``begun``: whether the headers of the response were sent; they are among the fields if not.
    """
    if isinstance(error, CallFailed):
        number, text = int(error.status), error.message
    else:
        error = request_error(error)
        # One more than is sent, so that the end shows that there is more.
        number, text = grpc_status(error.code), error.opening(MESSAGE_LIMIT + 1)
    fields = [(b"grpc-status", b"%d" % number), (b"grpc-message", grpc_message(text))]
    return HeaderFields(fields if begun else [_STATUS, _CONTENT_TYPE, *fields])
