"""The generated schema is loaded without grpc, once, and shares its classes with tritonclient."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gpubridge.config import model_config_schema
from gpubridge.errors import BridgeError, ErrorCode


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loads_neither_grpc_nor_the_packages_above_the_file() -> None:
    loaded = run_python(
        "import sys; from gpubridge.config import model_config_schema; "
        "model_config_schema().ModelConfig(name='m'); print('\\n'.join(sys.modules))"
    ).split()
    assert "google.protobuf.message" in loaded
    assert [name for name in loaded if name.split(".")[0] in ("grpc", "tritonclient")] == []


def test_is_not_loaded_by_import() -> None:
    run_python(
        "from gpubridge.config import model_config_schema; "
        "assert model_config_schema.cache_info().currsize == 0"
    )


def test_is_loaded_once() -> None:
    assert model_config_schema() is model_config_schema()


@pytest.mark.parametrize("ours_first", [True, False])
def test_shares_classes_with_the_packaged_module(ours_first: bool) -> None:
    pytest.importorskip("grpc", reason="tritonclient.grpc needs grpcio")
    imports = [
        "from gpubridge.config import model_config_schema; ours = model_config_schema()",
        "from tritonclient.grpc import model_config_pb2, service_pb2",
    ]
    run_python(
        "\n".join(imports if ours_first else reversed(imports))
        + "\nassert ours.ModelConfig is model_config_pb2.ModelConfig"
        "\nservice_pb2.ModelConfigResponse(config=ours.ModelConfig(name='m'))"
    )


def test_a_second_registration_of_the_same_file_gives_the_same_classes() -> None:
    """A later import of tritonclient.grpc does this; shown here without grpcio."""
    path = model_config_schema().__file__
    spec = importlib.util.spec_from_file_location("model_config_pb2_again", path)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.ModelConfig is model_config_schema().ModelConfig


def test_missing_tritonclient_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BridgeError, match="pip install tritonclient") as caught:
        model_config_schema.__wrapped__()
    assert caught.value.code is ErrorCode.INTERNAL


def test_schema_of_a_newer_protobuf_says_what_to_upgrade(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "grpc").mkdir()
    (tmp_path / "grpc" / "model_config_pb2.py").write_text(
        "from google.protobuf import runtime_version as v\n"
        "v.ValidateProtobufRuntimeVersion(v.Domain.PUBLIC, 999, 0, 0, '', 'model_config.proto')\n"
    )
    found = importlib.machinery.ModuleSpec("tritonclient", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(BridgeError, match="pip install --upgrade protobuf tritonclient"):
        model_config_schema.__wrapped__()
