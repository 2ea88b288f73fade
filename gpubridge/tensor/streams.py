"""CUDA streams by their handles, and the current streams of frameworks that a model has imported.

This module imports no framework and makes none initialise CUDA. A handle is valid as long as its
stream exists, so it is stored with the object that owns the stream: CuPy destroys a stream with that
object; PyTorch never destroys the streams of its pool. To use a handle later is undefined, and has ended
processes. So a handle of which no owner is known is not stored: its place is taken by `ANY_STREAM`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

#: Handles of CUDA's default streams, as in DLPack and the CUDA array interface.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2
#: In place of handles: all streams of the device's context.
ANY_STREAM = -1

_KNOWN = ("torch", "cupy")
#: Other libraries that use DLPack capsules on their own streams, which are not known here.
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
"""Handles of streams that may use memory, each with the objects that keep it alive; `ANY_STREAM` has none."""


class FrameworkStream(NamedTuple):
    """Handle of a framework's stream, and the framework's object."""

    handle: int
    owner: object


def current_streams(ordinal: int) -> list[FrameworkStream]:
    """Return this thread's current streams on a device, one of each known framework with CUDA."""
    streams = (_current_stream(sys.modules.get(name), ordinal) for name in _KNOWN)
    return [stream for stream in streams if stream is not None]


def current_stream_of(tensor: object, ordinal: int) -> FrameworkStream:
    """Return this thread's current stream of a tensor's library; the legacy stream if it has none.

    Later work of the library on the tensor's memory is on that stream or ordered after it. A subclass
    of a library's class belongs to that library.
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
        # current_stream() would initialise CUDA; before that, PyTorch has no work on any stream.
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
    """Return whether a library with unknown streams is imported, which may consume capsules."""
    return any(name in sys.modules for name in _OTHERS)


def named_stream(stream: Any) -> tuple[int, object]:
    """Return the handle of a stream that a consumer names, and the object that owns the stream, if any.

    The object has the method ``__cuda_stream__``, by which libraries exchange streams.
    """
    describe = getattr(stream, "__cuda_stream__", None)
    if describe is None:
        return stream, None
    _, handle = describe()
    return int(handle), stream


def remember(streams: UsedStreams, handle: int, ordinal: int, owner: object = None) -> None:
    """Add a stream with its owner, or with the object of a framework whose current stream it is."""
    if handle in (LEGACY_STREAM, PER_THREAD_STREAM):
        # The second is another one in each thread; the legacy stream waits for those of all threads.
        streams.setdefault(LEGACY_STREAM, [])
        return
    owners = [owner]
    if owner is None:
        owners = [each.owner for each in current_streams(ordinal) if each.handle == handle]
    _hold(streams, [FrameworkStream(handle, each) for each in owners])
    if not streams.get(handle):
        streams[ANY_STREAM] = []


def remember_unnamed(streams: UsedStreams, ordinal: int) -> None:
    """Add the possible streams of a consumer or producer that named none."""
    streams.setdefault(LEGACY_STREAM, [])
    _hold(streams, current_streams(ordinal))


def _hold(streams: UsedStreams, current: Sequence[FrameworkStream]) -> None:
    for handle, owner in current:
        owners = streams.setdefault(handle, [])
        if owner not in owners:
            owners.append(owner)
