"""Copies between host buffers that leave the GIL to other threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor.native import native

if TYPE_CHECKING:
    from typing import Any

__all__ = ["copy"]


def copy(destination: Any, source: Any) -> None:
    """Copy all bytes of `source` over `destination`; the two may overlap.

    Parameters
    ----------
    destination : buffer
        Writable and C-contiguous, of the same size in bytes as `source`.
    source : buffer
        C-contiguous.

    Raises
    ------
    BridgeError
        INVALID_ARG if the sizes differ.
    BufferError, TypeError, ValueError
        If an argument is not such a buffer, or `destination` is read-only.
    """
    target = memoryview(destination)
    origin = memoryview(source)
    if target.nbytes != origin.nbytes:
        raise BridgeError(
            f"expected a source of {target.nbytes} bytes, got {origin.nbytes} bytes",
            ErrorCode.INVALID_ARG,
        )
    if target.readonly:
        raise ValueError("expected a writable destination, got a read-only buffer")
    if target.nbytes == 0:
        return
    module = native()
    if module is not None:
        module.copy(target, origin)
        return
    # NumPy lets go of the GIL for large copies and minds overlap.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(origin, np.uint8))
