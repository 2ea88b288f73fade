"""The compiled module: optional in stubs, where absence has a reason; required in the server."""

import importlib
import subprocess
import sys

import pytest

from gpubridge.errors import BridgeError
from gpubridge.tensor import native


@pytest.fixture
def fresh_loader(monkeypatch):
    monkeypatch.setattr(native, "_requiring", [])
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


def test_the_variable_for_stubs_is_not_for_the_server(fresh_loader):
    fresh_loader.setenv("GPUBRIDGE_NO_NATIVE", "1")
    assert native.native() is None
    native.require_native()
    assert native.native() is not None


def test_the_server_says_why_it_cannot_start_and_what_builds_the_module(fresh_loader):
    def fail(name):
        raise ImportError("undefined symbol: x")

    fresh_loader.setattr(importlib, "import_module", fail)
    with pytest.raises(BridgeError, match=r"undefined symbol: x.*pip install"):
        native.require_native()


def without_module(*arguments, **variables):
    """Run a command of gpubridge where the compiled module cannot be imported."""
    code = (
        "import sys; sys.modules['gpubridge._native'] = None\n"
        "from gpubridge.cli import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def test_a_server_without_it_does_not_start(tmp_path):
    refused = without_module("serve", "--model-repository", str(tmp_path))
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: gpubridge requires its compiled module: gpubridge._native")
    assert line.endswith(native.BUILD_ADVICE)


def test_the_doctor_names_it():
    seen = without_module("doctor")
    assert seen.returncode == 1
    assert "no     compiled module: gpubridge._native cannot be imported" in seen.stdout
    assert native.BUILD_ADVICE in seen.stdout


def test_importing_the_rooms_imports_nothing_optional():
    code = (
        "import sys, gpubridge.tensor.dlpack\n"
        "heavy = {'ml_dtypes', 'torch', 'gpubridge._native', 'gpubridge.tensor.dlpack_abi'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import gpubridge.pb_utils\n"
        # What models see derives from the compiled types.
        "print(sorted(heavy & set(sys.modules) - {'gpubridge._native'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["[]", "[]"]
