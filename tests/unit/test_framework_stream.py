"""The stream on which a library works, asked of those that are imported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.tensor.device_bytes import LEGACY_STREAM
from gpubridge.tensor.dlpack import current_stream_of

PYTORCH = SimpleNamespace(
    cuda=SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=7))
)
CUPY = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=8)))
DEFAULT = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))


@pytest.mark.parametrize(
    ("library", "stream"),
    [(PYTORCH, 7), (CUPY, 8), (DEFAULT, LEGACY_STREAM), (SimpleNamespace(), LEGACY_STREAM)],
)
def test_a_librarys_current_stream(monkeypatch, library, stream):
    monkeypatch.setitem(sys.modules, "library", library)
    kind = type("Tensor", (), {"__module__": "library.tensors"})
    assert current_stream_of(kind()) == stream


def test_of_an_unknown_library_it_is_the_legacy_one():
    assert current_stream_of(np.zeros(1)) == LEGACY_STREAM
