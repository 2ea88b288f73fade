"""Compressed messages: gzip or deflate, in requests, and in answers if the server is told to."""

from __future__ import annotations

from collections.abc import Sequence

from gpubridge.config import CompressionLevel
from gpubridge.dataplane import HeaderFields
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.coding import compress, decompress
from gpubridge.frontend.grpc.status import RESPONSE_FIELDS, CallFailed, Status
from gpubridge.protocol.grpc.infer_response import FrameSegments

PREFIX = 5
"""Bytes before each message: a flag and its length."""

_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


def unpacked(message: bytes, coding: bytes, limit: int) -> bytes:
    """Return a compressed message as it was.

    - ``coding``: the call's ``grpc-encoding``; empty for none.
    - ``limit``: bytes of the longest message.

    Raises CallFailed: INTERNAL for what was not compressed so, or is too long; UNIMPLEMENTED for
    another coding.
    """
    try:
        return decompress(coding or b"identity", message, limit)
    except BridgeError as error:
        status = Status.INTERNAL
        if error.code == ErrorCode.UNSUPPORTED:
            status = Status.UNIMPLEMENTED
        raise CallFailed(status, error.message) from error


class Packing:
    """How the messages of an answer are compressed.

    - ``coding``: with what.
    - ``level``: how well, as zlib counts.

    Attribute ``headers``: what the answer begins with.
    """

    __slots__ = ("_coding", "_level", "headers")

    def __init__(self, coding: str, level: int) -> None:
        self._coding = coding
        self._level = level
        fields = (*RESPONSE_FIELDS, (b"grpc-encoding", coding.encode()))
        self.headers = HeaderFields(fields, repeat=True)

    def frame(self, segments: FrameSegments) -> FrameSegments:
        """Return a frame with its message compressed, or as it was if that is not shorter."""
        parts = list(_without_prefix(segments))
        length = sum(len(part) for part in parts)
        packed = compress(self._coding, parts, self._level)
        if len(packed) >= length:
            return segments
        return [b"\1%b%b" % (len(packed).to_bytes(PREFIX - 1, "big"), packed)]


def accepted_packing(accepted: bytes, level: CompressionLevel) -> Packing | None:
    """Return how answers are compressed for a client; None for not at all.

    ``accepted``: its ``grpc-accept-encoding``.
    """
    codings = {coding.strip() for coding in accepted.decode("latin-1").lower().split(",")}
    for coding in ("gzip", "deflate"):
        if level != "none" and coding in codings:
            return Packing(coding, _ZLIB_LEVELS[level])
    return None


def _without_prefix(segments: Sequence[bytes | memoryview]) -> FrameSegments:
    """Return the message in a frame's segments, the first of which has all of the prefix."""
    return [memoryview(segments[0])[PREFIX:], *segments[1:]]
