"""Compressed answers: gzip or deflate, for clients that accept them, if the server is told to."""

from __future__ import annotations

from collections.abc import Sequence

from gpubridge.config import CompressionLevel
from gpubridge.frontend.grpc.framing import PREFIX
from gpubridge.frontend.grpc.status import answer_fields
from gpubridge.frontend.http.message import compress
from gpubridge.frontend.http2.compression import encode_headers
from gpubridge.protocol.grpc.infer_response import FrameSegments

__all__ = ["Packing", "accepted_packing"]

_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}


class Packing:
    """How the messages of an answer are compressed.

    Parameters
    ----------
    coding : {"gzip", "deflate"}
        With what.
    level : int
        How well, as zlib counts.

    Attributes
    ----------
    headers : bytes
        The header block that the answer begins with.
    """

    __slots__ = ("_coding", "_level", "headers")

    def __init__(self, coding: str, level: int) -> None:
        self._coding = coding
        self._level = level
        self.headers = encode_headers((*answer_fields(), (b"grpc-encoding", coding.encode())))

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

    Parameters
    ----------
    accepted : bytes
        Its ``grpc-accept-encoding``.
    """
    if level == "none":
        return None
    codings = {coding.strip() for coding in accepted.decode("latin-1").lower().split(",")}
    for coding in ("gzip", "deflate"):
        if coding in codings:
            return Packing(coding, _ZLIB_LEVELS[level])
    return None


def _without_prefix(segments: Sequence[bytes | memoryview]) -> FrameSegments:
    """Return the message in a frame's segments, the first of which has all of the prefix."""
    return [memoryview(segments[0])[PREFIX:], *segments[1:]]
