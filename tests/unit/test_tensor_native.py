"""The optional compiled module: absence is a value with a reason; copies."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest

from gpubridge.errors import BridgeError
from gpubridge.tensor import host_copy, native


@pytest.fixture
def fresh_loader(monkeypatch):
    native._load.cache_clear()
    yield monkeypatch
    native._load.cache_clear()


def test_turned_off_by_the_environment(fresh_loader):
    fresh_loader.setenv("GPUBRIDGE_NO_NATIVE", "1")
    assert native.native() is None
    assert native.absence() == "turned off by GPUBRIDGE_NO_NATIVE=1"


@pytest.mark.parametrize("error", [ImportError("undefined symbol: x"), SystemError("wrong ABI")])
def test_a_module_that_cannot_be_loaded_is_absent_with_the_reason(fresh_loader, error):
    fresh_loader.delenv("GPUBRIDGE_NO_NATIVE", raising=False)

    def fail(name):
        raise error

    fresh_loader.setattr(importlib, "import_module", fail)
    assert native.native() is None
    assert str(error) in native.absence()


def test_presence_has_no_reason():
    assert (native.native() is None) == (native.absence() is not None)


def test_importing_the_rooms_imports_nothing_optional():
    code = (
        "import sys, gpubridge.pb_utils, gpubridge.tensor.dlpack\n"
        "heavy = {'ml_dtypes', 'torch', 'gpubridge._native', 'gpubridge.tensor.dlpack_abi'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.fixture(params=["native", "python"])
def copy(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(host_copy, "native", lambda: None)
    elif native.native() is None:
        pytest.skip(f"no compiled module: {native.absence()}")
    return host_copy.copy


def test_copy_between_buffers_of_any_kind(copy):
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    target = bytearray(source.nbytes)
    copy(target, source)
    assert bytes(target) == source.tobytes()
    copy(memoryview(target)[:4], b"abcd")
    assert target[:4] == b"abcd"
    copy(bytearray(), b"")


def test_copy_minds_overlap(copy):
    memory = bytearray(range(16))
    view = memoryview(memory)
    copy(view[4:], view[:12])
    assert bytes(memory) == bytes([0, 1, 2, 3, *range(12)])


def test_copy_refuses_other_sizes_and_read_only_targets(copy):
    with pytest.raises(BridgeError, match="expected a source of 4 bytes, got 3 bytes"):
        copy(bytearray(4), b"abc")
    with pytest.raises(ValueError, match="read-only"):
        copy(b"abc", b"xyz")
