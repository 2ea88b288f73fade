"""The streams on which frameworks work, asked of those that are imported, and kept with their objects.

The frameworks are stand-ins of what PyTorch and CuPy document.
"""

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.tensor import streams
from gpubridge.tensor.streams import LEGACY_STREAM, PER_THREAD_STREAM, current_stream_of


class FrameworkStream:
    """A stream of PyTorch's or CuPy's, which can be watched."""

    def __init__(self, handle):
        self.cuda_stream = self.ptr = handle


def pytorch(handle, initialized=True):
    def current_stream(device=None):
        assert initialized, "asking would initialise PyTorch"
        return FrameworkStream(handle)

    return SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: initialized, current_stream=current_stream)
    )


def cupy(stream):
    """As CuPy does, this holds its current stream and gives that object."""
    return SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device=-1: stream))


@pytest.fixture(autouse=True)
def _no_frameworks(monkeypatch):
    for name in (*streams._KNOWN, *streams._OTHERS):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("library", "handle"),
    [
        (pytorch(7), 7),
        (pytorch(0), LEGACY_STREAM),
        (pytorch(7, initialized=False), LEGACY_STREAM),
        (cupy(FrameworkStream(8)), 8),
        (cupy(FrameworkStream(0)), LEGACY_STREAM),
        (SimpleNamespace(), LEGACY_STREAM),
    ],
)
def test_a_librarys_current_stream(monkeypatch, library, handle):
    monkeypatch.setitem(sys.modules, "library", library)
    kind = type("Tensor", (), {"__module__": "library.tensors"})
    assert current_stream_of(kind(), 0).handle == handle
    derived = type("Image", (kind,), {"__module__": "vision.tensors"})
    monkeypatch.setitem(sys.modules, "vision", SimpleNamespace())
    assert current_stream_of(derived(), 0).handle == handle


def test_of_an_unknown_library_it_is_the_legacy_one():
    assert current_stream_of(np.zeros(1), 0) == (LEGACY_STREAM, None)


def test_the_current_streams_are_those_of_frameworks_in_use(monkeypatch):
    assert streams.current_streams(0) == []
    monkeypatch.setitem(sys.modules, "torch", pytorch(7, initialized=False))
    assert streams.current_streams(0) == []
    monkeypatch.setitem(sys.modules, "torch", pytorch(7))
    monkeypatch.setitem(sys.modules, "cupy", cupy(FrameworkStream(0)))
    assert [stream.handle for stream in streams.current_streams(0)] == [7, LEGACY_STREAM]


@pytest.mark.parametrize("name", ["jax", "tensorflow", "numba", "pycuda", "cudf", "tensorrt"])
def test_other_consumers(monkeypatch, name):
    assert not streams.others_imported()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert streams.others_imported()


@pytest.mark.parametrize("named", [True, False])
def test_a_stream_lives_as_long_as_its_handle_is_remembered(monkeypatch, named):
    current = [FrameworkStream(8)]
    monkeypatch.setitem(
        sys.modules,
        "cupy",
        SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device=-1: current[-1])),
    )
    used = {}
    if named:
        streams.remember(used, 8, 0)
    else:
        streams.remember_unnamed(used, 0)
    watch = weakref.ref(current[0])
    current[:] = [FrameworkStream(9)]
    # Another one's, or no one's, does not take its place.
    streams.remember(used, 8, 0)
    assert watch() is not None
    assert set(used) == {8} if named else {8, LEGACY_STREAM}
    used.clear()
    assert watch() is None


def test_a_handle_without_an_owner_is_not_kept():
    """Its stream may be destroyed when the handle would be used."""
    used, owner = {}, SimpleNamespace(__cuda_stream__=lambda: (0, 8))
    streams.remember(used, 9, 0)
    assert used == {streams.ANY_STREAM: []}
    handle, owned = streams.named_stream(owner)
    streams.remember(used, handle, 0, owned)
    assert used == {streams.ANY_STREAM: [], 8: [owner]}
    # The owner is known by now.
    del used[streams.ANY_STREAM]
    streams.remember(used, 8, 0)
    assert used == {8: [owner]}


def test_the_per_thread_stream_is_remembered_as_the_one_that_all_threads_have():
    used = {}
    streams.remember(used, PER_THREAD_STREAM, 0)
    assert used == {LEGACY_STREAM: []}
