"""Which interpreter runs a model's stub, and with what environment variables."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpubridge.config import ModelConfig
from gpubridge.errors import invalid

_logger = logging.getLogger(__name__)

PARAMETER = "EXECUTION_ENV_PATH"
_TRITON_STUB = "triton_python_backend_stub"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_INTERPRETERS = ("bin/python3", "bin/python")

_ENVIRONMENTS = ("pb_exec_env_model.py.tar.gz", "venv")
"""Beside the backend's ``model.py``: Triton's name for a packed one, and ours for a directory."""


@dataclass(frozen=True, slots=True)
class StubEnvironment:
    """An interpreter and the variables it starts with."""

    python: str
    variables: dict[str, str]


def environment_path(model_dir: Path, parameters: dict[str, str]) -> Path | None:
    """Return what a model's ``EXECUTION_ENV_PATH`` names, be it there or not; None without it.

    Raises BridgeError: INVALID_ARG for a relative path.
    """
    stub = model_dir / _TRITON_STUB
    if stub.exists():
        _logger.warning(
            "%s is ignored: stubs here run on any Python from 3.9 on; name the model's environment "
            "with the parameter %s",
            stub,
            PARAMETER,
        )
    value = parameters.get(PARAMETER)
    if not value:
        return None
    path = Path(value.replace(_MODEL_DIRECTORY, str(model_dir.resolve())))
    if not path.is_absolute() or "\0" in value:
        raise invalid(
            f"Failed to get the canonical path for {value}. (parameter {PARAMETER} expects an "
            f"absolute path, or one that begins with {_MODEL_DIRECTORY})"
        )
    return path


def own_environment() -> StubEnvironment:
    """Return the server's own interpreter and variables."""
    return StubEnvironment(sys.executable, _inherited())


def environment_at(root: Path, source: Path) -> StubEnvironment:
    """Return the interpreter in an unpacked environment.

    ``source``: what the user named: `root`, or the archive that it comes from.

    Raises BridgeError: INVALID_ARG when there is no interpreter in it, with what is there instead.
    """
    python = next((root / name for name in _INTERPRETERS if (root / name).exists()), None)
    if python is None:
        raise invalid(f"{PARAMETER} {source} {_what_is_there(root)}")
    variables = _inherited()
    variables["VIRTUAL_ENV"] = str(root)
    variables["PATH"] = _prepend(root / "bin", variables.get("PATH"))
    variables["LD_LIBRARY_PATH"] = _prepend(root / "lib", variables.get("LD_LIBRARY_PATH"))
    # The server's packages were built for the server's interpreter.
    variables.pop("PYTHONPATH", None)
    return StubEnvironment(str(python), variables)


def _what_is_there(root: Path) -> str:
    """Say why there is no interpreter in an environment, and what to do."""
    for name in _INTERPRETERS:
        if (root / name).is_symlink():
            target = (root / name).readlink()
            return (
                f"cannot be used: its {name} is a link to {target}, which this machine does not have; "
                "install that Python here, or use an environment that brings its own (conda-pack)"
            )
    missing = "holds no bin/python3: expected a virtual environment (venv, uv or conda)"
    nested = sorted(str(p.relative_to(root)) for p in root.glob("*/bin/python*"))
    if nested:
        folder = nested[0].partition("/")[0]
        missing += f", got one in its folder {folder!r}: that has to be the top"
    return missing


def _inherited() -> dict[str, str]:
    variables = dict(os.environ)
    variables.pop("PYTHONHOME", None)
    return variables


def _prepend(folder: Path, path: str | None) -> str:
    return f"{folder}:{path}" if path else str(folder)


def environment_parameters(config: ModelConfig) -> dict[str, str]:
    """Return a model's parameters, with its backend's environment unless it names one itself."""
    parameters = config.parameters
    if config.backend_file is None or parameters.get(PARAMETER):
        return parameters
    for name in _ENVIRONMENTS:
        path = config.backend_file.parent / name
        if path.exists():
            return {**parameters, PARAMETER: str(path.absolute())}
    return parameters
