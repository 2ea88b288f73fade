"""Imports a model's Python file the way Triton's stub does, and makes pb_utils importable for it."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import types
from typing import Any

from gpubridge.pb_utils.host import register_aliases

__all__ = ["load_model", "model_error_text"]


def load_model(path: str, version: str) -> Any:
    """Import the file at ``path`` and return its ``TritonPythonModel`` class.

    The module is ``<version>.<stem>``, so that ``from . import sibling`` works; the version's and
    the model's folder are on sys.path, so that ``import sibling`` does.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    AttributeError
        When it defines no ``TritonPythonModel``.
    Exception
        Whatever the file raises while it is imported.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"Python model file not found in '{path}'")
    register_aliases()
    folder = os.path.dirname(path)
    sys.path.extend((folder, os.path.dirname(folder)))
    package = types.ModuleType(version)
    package.__path__ = [folder]
    sys.modules[version] = package
    stem = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(f"{version}.{stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python model file '{path}' has no name that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model: Any = module.TritonPythonModel
    return model


def model_error_text(error: BaseException) -> str:
    """Say what a model raised, in the form of Triton: the error, then where, innermost first."""
    try:
        message = str(error) or "<EMPTY MESSAGE>"
    except Exception:
        message = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    lines = [f"{type(error).__name__}: {message}", "", "At:"]
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f for f in frames if not os.path.abspath(f.filename).startswith(_PACKAGE)]
    lines += [
        f"  {frame.filename}({frame.lineno}): {frame.name}" for frame in reversed(shown or frames)
    ]
    return "\n".join(lines) + "\n"


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
