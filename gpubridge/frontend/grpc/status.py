"""How a call ends: the status numbers of gRPC, and the trailers that carry them."""

from __future__ import annotations

import enum
import functools

from gpubridge.errors import BridgeError
from gpubridge.frontend.http2.compression import encode_headers
from gpubridge.protocol.grpc.status import grpc_message, grpc_status

__all__ = ["CallFailed", "Status", "answer_fields", "failure", "headers", "ok_trailers"]


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


@functools.cache
def headers() -> bytes:
    """Return the header block that every answer begins with."""
    return encode_headers(answer_fields())


def answer_fields() -> tuple[tuple[bytes, bytes], ...]:
    """Return the fields that every answer begins with."""
    return (
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    )


@functools.cache
def ok_trailers() -> bytes:
    """Return the block that every answer ends with that is none of failure."""
    return encode_headers(((b"grpc-status", b"0"),))


def failure(error: BridgeError | CallFailed) -> list[tuple[bytes, bytes]]:
    """Return the fields that tell an error."""
    number = grpc_status(error.code) if isinstance(error, BridgeError) else int(error.status)
    return [(b"grpc-status", b"%d" % number), (b"grpc-message", grpc_message(error.message))]
