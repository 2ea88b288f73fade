"""Imports a model's Python file the way Triton's stub does, and makes pb_utils importable for it."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils.aliases import register_aliases

__all__ = ["load_model", "model_error_text"]


def load_model(path: str, package: str) -> Any:
    """Import the file at ``path`` and return its ``TritonPythonModel`` class.

    A model's own file is ``<package>.<stem>``, where the package is its version, so that
    ``from . import sibling`` works, and an ``__init__.py`` beside it runs first; the version's and
    the model's folder are on sys.path, so that ``import sibling`` works. The file of a backend has no package, and only its own folder is on
    sys.path: what lies beside it are other backends, named as the libraries that they import.

    Raises
    ------
    BridgeError
        When there is no such file.
    AttributeError
        When it defines no ``TritonPythonModel``.
    Exception
        Whatever the file raises while it is imported.
    """
    if not os.path.isfile(path):
        raise BridgeError(f"Python model file not found in '{path}'", ErrorCode.NOT_FOUND)
    register_aliases()
    folder = os.path.dirname(path)
    sys.path.append(folder)
    name = os.path.splitext(os.path.basename(path))[0]
    if package:
        sys.path.append(os.path.dirname(folder))
        _make_package(package, folder)
        name = f"{package}.{name}"
    loader = _FreshLoader(name, path) if package and path.endswith(".py") else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python model file '{path}' has no name that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model: Any = module.TritonPythonModel
    return model


def _make_package(name: str, folder: str) -> None:
    """Make the folder a package, by its ``__init__.py`` if it has one."""
    path = os.path.join(folder, "__init__.py")
    if os.path.isfile(path):
        spec = importlib.util.spec_from_file_location(
            name, path, loader=_FreshLoader(name, path), submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None  # noqa: PT018
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        return
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]


class _FreshLoader(SourceFileLoader):
    """Compiles a file each time.

    Cached bytecode is taken for that of any source of the same size and second: a model that is
    written twice in a second, and loaded each time, would be what it was before.
    """

    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code of the file as it is."""
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code


def model_error_text(error: BaseException) -> str:
    """Say what a model raised, in the form of Triton: the error, then where, innermost first."""
    try:
        message = str(error) or _EMPTY
    except BaseException as another:
        text = _told(error, "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>")
        return f"{text}\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: {_told(another, _text(another))}"
    return _told(error, message)


def _text(error: BaseException) -> str:
    try:
        return str(error) or _EMPTY
    except BaseException:
        return "<MESSAGE UNAVAILABLE>"


def _told(error: BaseException, message: str) -> str:
    text = f"{type(error).__name__}: {message}"
    # Not extract_tb: it reads the source files.
    places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    shown = [
        f"  {code.co_filename}({line}): {code.co_name}\n"
        for code, line in reversed(places)
        if not code.co_filename.startswith(_NOT_THE_MODEL) or code.co_filename.startswith(_BACKENDS)
    ]
    return f"{text}\n\nAt:\n{''.join(shown)}" if shown else text


_EMPTY = "<EMPTY MESSAGE>"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_MODEL = (_PACKAGE, "<frozen importlib.")
_BACKENDS = os.path.join(_PACKAGE, "backends", "")
