"""Which interpreter runs a model's stub, and with what environment variables."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["StubEnvironment", "stub_environment"]

_logger = logging.getLogger(__name__)

_PARAMETER = "EXECUTION_ENV_PATH"
_TRITON_STUB = "triton_python_backend_stub"
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"


@dataclass(frozen=True, slots=True)
class StubEnvironment:
    """An interpreter and the variables it starts with."""

    python: str
    variables: dict[str, str]


def stub_environment(model_dir: Path, parameters: dict[str, str]) -> StubEnvironment:
    """Choose the interpreter of a model.

    Without the parameter ``EXECUTION_ENV_PATH`` it is the server's own. With it, it is that
    directory's: any virtual environment (venv, uv, conda) with Python 3.9 or newer and NumPy.

    Raises
    ------
    BridgeError
        When the parameter names no environment (INVALID_ARG), or an archive (UNSUPPORTED).
    """
    variables = dict(os.environ)
    variables.pop("PYTHONHOME", None)
    value = parameters.get(_PARAMETER)
    stub = model_dir / _TRITON_STUB
    if stub.exists():
        _logger.warning(
            "%s is ignored: stubs here run on any Python from 3.9 on; name the model's environment "
            "with the parameter %s",
            stub,
            _PARAMETER,
        )
    if not value:
        return StubEnvironment(sys.executable, variables)
    root = Path(value.replace(_MODEL_DIRECTORY, str(model_dir.resolve())))
    if root.is_file():
        raise BridgeError(
            f"{_PARAMETER} {root} is a file: packed environments are not served yet; unpack it and "
            "name the directory",
            ErrorCode.UNSUPPORTED,
        )
    python = next(
        (p for name in ("python3", "python") if (p := root / "bin" / name).exists()), None
    )
    if python is None:
        raise BridgeError(
            f"Path {root} does not exist. The Python environment should contain an 'activate' "
            f"script. (expected an environment with bin/python3 there: parameter {_PARAMETER})"
            if not root.exists()
            else f"{_PARAMETER} {root} holds no bin/python3: expected a virtual environment (venv, "
            "uv or conda)",
            ErrorCode.INVALID_ARG,
        )
    variables["VIRTUAL_ENV"] = str(root)
    variables["PATH"] = _prepend(root / "bin", variables.get("PATH"))
    variables["LD_LIBRARY_PATH"] = _prepend(root / "lib", variables.get("LD_LIBRARY_PATH"))
    # The server's packages were built for the server's interpreter.
    variables.pop("PYTHONPATH", None)
    return StubEnvironment(str(python), variables)


def _prepend(folder: Path, path: str | None) -> str:
    return f"{folder}:{path}" if path else str(folder)
