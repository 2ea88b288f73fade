"""The optional compiled module: absence is a value with a reason; copies."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from gpubridge.tensor import native


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
