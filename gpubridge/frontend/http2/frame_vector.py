"""DATA frames whose payloads lie side by side in memory, and their headers elsewhere.

A body of megabytes in frames of 16 KiB is hundreds of pieces. They are named here by four values,
and become pieces of memory only where the socket is read or written.
"""

from __future__ import annotations

from typing import NamedTuple

from gpubridge.frontend.http2.frames import HEADER_BYTES

__all__ = ["FrameVector"]


class FrameVector(NamedTuple):
    """What stands on the wire as lead, header, payload, header, payload...

    Attributes
    ----------
    headers : bytes or memoryview
        One after the other; there may be more than are needed.
    payload : memoryview
        Of bytes ("B"), C-contiguous.
    size : int
        Bytes of each frame's payload; the last may have fewer.
    lead : int
        How many bytes the payload begins with that belong to a frame whose header came before.
    """

    headers: bytes | memoryview
    payload: memoryview
    size: int
    lead: int = 0

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    @property
    def frames(self) -> int:
        """How many headers there are on the wire."""
        return -((self.lead - len(self.payload)) // self.size)

    @property
    def nbytes(self) -> int:
        """How many bytes there are on the wire."""
        return len(self.payload) + self.frames * HEADER_BYTES

    def pieces(self) -> list[bytes | memoryview]:
        """Return the memory of each piece, in the order of the wire."""
        headers, payload, size, lead = self
        pieces: list[bytes | memoryview] = [payload[:lead]] if lead else []
        at = 0
        for start in range(lead, len(payload), size):
            pieces.append(headers[at : at + HEADER_BYTES])
            pieces.append(payload[start : start + size])
            at += HEADER_BYTES
        return pieces
