"""Large messages between a socket and memory, many frames per system call.

A transport takes pieces of memory one at a time when it receives, and prepares each of them when it
sends; both cost more than the calls to the kernel. So here the socket is asked directly, at moments
at which its transport has nothing to send itself. What does not go through at once is the
transport's.
"""

from __future__ import annotations

import contextlib
import os

from gpubridge.frontend.http2.frame_vector import FrameVector
from gpubridge.tensor.native import native

__all__ = ["pieces_of", "read_vector", "unsent", "write_parts"]

_MOST_PIECES = os.sysconf("SC_IOV_MAX")


def read_vector(descriptor: int, vector: FrameVector) -> int:
    """Receive into a vector what the socket has.

    Returns
    -------
    int
        How many bytes; 0 if there are none, or the socket has failed, which its transport will see.
    """
    compiled = native()
    if compiled is not None:
        return compiled.read_vector(descriptor, vector)
    with contextlib.suppress(OSError):
        return os.readv(descriptor, vector.pieces()[:_MOST_PIECES])
    return 0


def write_parts(descriptor: int, parts: list[bytes | memoryview | FrameVector]) -> int:
    """Send as much of some parts as the socket takes.

    Returns
    -------
    int
        How many bytes; 0 if none, or the socket has failed, which its transport will see.
    """
    compiled = native()
    if compiled is not None:
        return compiled.write_parts(descriptor, parts)
    with contextlib.suppress(OSError):
        return os.writev(descriptor, pieces_of(parts)[:_MOST_PIECES])
    return 0


def pieces_of(parts: list[bytes | memoryview | FrameVector]) -> list[bytes | memoryview]:
    """Return parts with each vector as its pieces."""
    pieces: list[bytes | memoryview] = []
    for part in parts:
        if isinstance(part, FrameVector):
            pieces += part.pieces()
        else:
            pieces.append(part)
    return pieces


def unsent(parts: list[bytes | memoryview | FrameVector], sent: int) -> list[bytes | memoryview]:
    """Return what of parts is left after so many bytes."""
    left: list[bytes | memoryview] = []
    for part in parts:
        nbytes = part.nbytes if isinstance(part, FrameVector) else len(part)
        if sent >= nbytes:
            sent -= nbytes
            continue
        for piece in part.pieces() if isinstance(part, FrameVector) else [part]:
            if sent < len(piece):
                left.append(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))
    return left
