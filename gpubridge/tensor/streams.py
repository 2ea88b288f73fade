"""CUDA streams by their handles, and the current ones of the frameworks that a model has imported.

No framework is imported here, or made to initialise CUDA. A handle is worth something as long as its
stream lives: a place that remembers it holds the framework's object with it, which destroys the stream when
it goes (CuPy's does; PyTorch never destroys those of its pool).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

#: CUDA's own numbers of its default streams, which DLPack and the CUDA array interface use, too.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2

_KNOWN = ("torch", "cupy")
#: What else takes DLPack capsules to streams of its own, of which nothing can be asked here.
_OTHERS = (
    "cucim",
    "cuda.core",
    "cudf",
    "cugraph",
    "cuml",
    "cuvs",
    "cvcuda",
    "dgl",
    "jax",
    "mxnet",
    "numba",
    "nvcv",
    "nvidia.dali",
    "nvidia.nvimgcodec",
    "nvmath",
    "onnxruntime",
    "paddle",
    "pycuda",
    "pylibraft",
    "PyNvVideoCodec",
    "rmm",
    "tensorflow",
    "tensorrt",
    "tvm",
    "vpi",
    "warp",
)

UsedStreams = dict[int, list[object]]
"""Handles of streams that may use memory, each with the objects that keep it alive, if any are known."""


class FrameworkStream(NamedTuple):
    """A framework's stream, by its handle, and the framework's object."""

    handle: int
    owner: object


def current_streams(ordinal: int) -> list[FrameworkStream]:
    """Return this thread's current streams on a device, of each known framework that uses CUDA."""
    streams = (_current_stream(sys.modules.get(name), ordinal) for name in _KNOWN)
    return [stream for stream in streams if stream is not None]


def current_stream_of(tensor: object, ordinal: int) -> FrameworkStream:
    """Return this thread's current stream in a tensor's library; the legacy one if that says none.

    Whatever the library does with the tensor's memory after it has handed it out is on that stream,
    or behind it. A class that derives from a library's is that library's.
    """
    for kind in type(tensor).__mro__:
        library = sys.modules.get(kind.__module__.partition(".")[0])
        stream = _current_stream(library, ordinal)
        if stream is not None:
            return stream
    return FrameworkStream(LEGACY_STREAM, None)


def _current_stream(library: Any, ordinal: int) -> FrameworkStream | None:
    cuda: Any = getattr(library, "cuda", None)
    pytorch = getattr(cuda, "current_stream", None)
    if pytorch is not None:
        # Asking would initialise it. Before, nothing of it is on any stream.
        if not cuda.is_initialized():
            return None
        stream = pytorch(ordinal)
        return FrameworkStream(int(stream.cuda_stream) or LEGACY_STREAM, stream)
    cupy = getattr(cuda, "get_current_stream", None)
    if cupy is not None:
        stream = cupy(ordinal)
        return FrameworkStream(int(stream.ptr) or LEGACY_STREAM, stream)
    return None


def others_imported() -> bool:
    """Return whether a capsule may be taken by a library whose streams are not known."""
    return any(name in sys.modules for name in _OTHERS)


def remember(streams: UsedStreams, handle: int, ordinal: int) -> None:
    """Add a stream, held by the frameworks whose current stream it is now."""
    if handle == PER_THREAD_STREAM:
        # It is another one in each thread; the legacy stream waits for those of all threads.
        handle = LEGACY_STREAM
    streams.setdefault(handle, [])
    if handle != LEGACY_STREAM:
        _hold(streams, [each for each in current_streams(ordinal) if each.handle == handle])


def remember_unnamed(streams: UsedStreams, ordinal: int) -> None:
    """Add the streams of a consumer or producer that has named none."""
    streams.setdefault(LEGACY_STREAM, [])
    _hold(streams, current_streams(ordinal))


def _hold(streams: UsedStreams, current: Sequence[FrameworkStream]) -> None:
    for handle, owner in current:
        owners = streams.setdefault(handle, [])
        if owner not in owners:
            owners.append(owner)
