"""On which stream a framework works that a tensor is of; only of those that the model has imported."""

from __future__ import annotations

import sys

from gpubridge.tensor.device_bytes import LEGACY_STREAM

__all__ = ["current_stream_of"]


def current_stream_of(tensor: object) -> int:
    """Return this thread's current stream in a tensor's library; the legacy one if that says none.

    Whatever the library does with the tensor's memory after it has handed it out is on that stream, or
    behind it.
    """
    library = sys.modules.get(type(tensor).__module__.partition(".")[0])
    cuda = getattr(library, "cuda", None)
    pytorch = getattr(cuda, "current_stream", None)
    if pytorch is not None:
        return int(pytorch().cuda_stream) or LEGACY_STREAM
    cupy = getattr(cuda, "get_current_stream", None)
    if cupy is not None:
        return int(cupy().ptr) or LEGACY_STREAM
    return LEGACY_STREAM
