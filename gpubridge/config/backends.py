"""Backends of models: Python's own, and backends whose ``model.py`` runs many models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpubridge.config.model_config import available_versions
from gpubridge.errors import invalid
from gpubridge.schema import ProtoMessage

PYTHON_BACKEND = "python"
BACKEND_FILENAME = "model.py"
_SHIPPED = Path(__file__).parents[1] / "backends"

_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
}
"""Triton's backends, by platform."""

_PLATFORM_OF_BACKEND = {"onnxruntime": "onnxruntime_onnx", "pytorch": "pytorch_libtorch"}

_BACKENDS_OF_FILES = {
    "model.py": PYTHON_BACKEND,
    "model.onnx": "onnxruntime",
    "model.pt": "pytorch",
    "model.graphdef": "tensorflow",
    "model.savedmodel": "tensorflow",
    "model.plan": "tensorrt",
}
"""Backend that Triton assumes, by file name, if neither backend nor platform is configured."""

_DEFAULT_FILES = {PYTHON_BACKEND: "model.py", "onnxruntime": "model.onnx", "pytorch": "model.pt"}


@dataclass(frozen=True, slots=True)
class Backends:
    """Backends written in Python: directories ``NAME`` with a ``model.py``.

    ``directory``: the user's backends, which override shipped ones of the same name.
    """

    directory: Path | None = None

    def find(self, name: str) -> Path | None:
        """Return the absolute path of a backend's ``model.py``; None for an unknown backend."""
        if not name or "/" in name or name.startswith("."):
            return None
        for directory in self._directories():
            path = directory / name / BACKEND_FILENAME
            if path.is_file():
                return path.absolute()
        return None

    def names(self) -> list[str]:
        """Return the names of all backends, sorted."""
        return sorted(
            {
                path.parent.name
                for directory in self._directories()
                for path in directory.glob(f"*/{BACKEND_FILENAME}")
            }
        )

    def _directories(self) -> list[Path]:
        return [_SHIPPED] if self.directory is None else [self.directory, _SHIPPED]


def is_model_directory(path: Path) -> bool:
    """Return whether a directory is a model: it has a configuration or a version with a model file."""
    if not path.is_dir():
        return False
    return (path / "config.pbtxt").is_file() or any(
        (path / str(version) / name).is_file()
        for version in available_versions(path)
        for name in _BACKENDS_OF_FILES
    )


def choose_backend(config: ProtoMessage, model_dir: Path, backends: Backends) -> None:
    """Fill in ``backend``, ``platform`` and ``default_model_filename`` as Triton does.

    Raises BridgeError: INVALID_ARG for a missing backend.
    """
    if _is_ensemble(config):
        return
    if not config.backend:
        config.backend = _implied_backend(config, model_dir, backends)
    expected = _PLATFORM_OF_BACKEND.get(config.backend)
    if expected is not None:
        config.platform = config.platform or expected
        if config.platform != expected:
            raise invalid(
                f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}"
            )
    if not config.default_model_filename:
        config.default_model_filename = _DEFAULT_FILES.get(config.backend, "")


def find_backend(config: ProtoMessage, model_dir: Path, backends: Backends) -> Path | None:
    """Return the ``model.py`` of a model's backend; None for a Python model or an ensemble.

    Fills in ``runtime``. Raises BridgeError: INVALID_ARG for an unknown backend.
    """
    if _is_ensemble(config) or config.backend == PYTHON_BACKEND:
        return None
    path = backends.find(config.backend)
    if path is None:
        raise invalid(
            f"unable to find backend library for backend '{config.backend}' of model "
            f"'{config.name}': there is none of that name here, {_expected(model_dir, backends)} "
            f"(your own backend is a file {config.backend}/{BACKEND_FILENAME} in the directory "
            "that --backend-directory names)"
        )
    config.runtime = config.runtime or BACKEND_FILENAME
    return path


def _is_ensemble(config: ProtoMessage) -> bool:
    return bool(config.platform == "ensemble" or config.HasField("ensemble_scheduling"))


def _implied_backend(config: ProtoMessage, model_dir: Path, backends: Backends) -> str:
    """Return the backend implied by the platform, or else by the model's file."""
    if config.platform:
        backend = _PLATFORMS.get(config.platform)
        if backend is None:
            raise invalid(
                f"unexpected platform type '{config.platform}' for {config.name}: "
                f"{_expected(model_dir, backends)}"
            )
        return backend
    asked = config.default_model_filename
    for filename in [asked] if asked else _BACKENDS_OF_FILES:
        if filename in _BACKENDS_OF_FILES and any(
            (model_dir / str(version) / filename).exists()
            for version in available_versions(model_dir)
        ):
            return _BACKENDS_OF_FILES[filename]
    hint = ""
    if config.name.isdecimal():
        # A directory named like a version: its parent is probably a model, not a repository.
        hint = f". If {model_dir.parent} is one model: gpubridge serve {model_dir.parent}"
    raise invalid(
        f"Could not determine backend for model '{config.name}' with no backend in model "
        f"configuration: {_expected(model_dir, backends)}{hint}"
    )


def _expected(model_dir: Path, backends: Backends) -> str:
    names = ", ".join([PYTHON_BACKEND, *backends.names()])
    return f"expected one of {names} as backend in {model_dir / 'config.pbtxt'}"
