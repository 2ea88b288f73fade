"""Imports a model's Python file as Triton's stub does, and makes pb_utils importable for it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import socket
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader
from typing import Any

from gpubridge import pb_utils
from gpubridge.errors import BridgeError, invalid, not_found
from gpubridge.pb_utils import Logger, c_module
from gpubridge.pb_utils.models import ModelConfig
from gpubridge.stub.error_text import model_error_text

_LONGEST_REASON = 16 * 1024
_ADDRESS = "127.0.0.1"


def load_model(path: str, package: str) -> Any:
    """Import the file at ``path`` and return its ``TritonPythonModel`` class.

    The working directory is first on sys.path. A model's own file is imported as
    ``<package>.<stem>``, where the package is its version, so that ``from . import sibling`` works,
    and an ``__init__.py`` beside it runs first; the version's and the model's folder are on sys.path,
    so that ``import sibling`` works. The file of a backend has no package, and only its own folder is
    on sys.path: beside that folder are other backends, named like the libraries that they import.
    """
    if not os.path.isfile(path):
        raise not_found(
            f"Failed to preinitialize Python stub: Python model file not found in '{path}'"
            f"{_file_instead(path)}"
        )
    register_aliases()
    folder = os.path.dirname(path)
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.path.append(folder)
    name = os.path.splitext(os.path.basename(path))[0]
    if package:
        sys.path.append(os.path.dirname(folder))
        _make_package(package, folder)
        name = f"{package}.{name}"
    loader = FreshLoader(name, path) if package and path.endswith(".py") else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python model file '{path}' has no name that Python can import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model: Any = module.TritonPythonModel
    return model


def _file_instead(path: str) -> str:
    """Say where a model file that was misplaced or misnamed is, if there is one."""
    folder, wanted = os.path.split(path)
    for place in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(place)):
                found = os.path.join(place, name)
                same = name.lower() == wanted.lower() or (place == folder and name.endswith(".py"))
                if same and os.path.isfile(found):
                    return f"; there is '{found}': move or rename it"
    return ""


def register_aliases() -> None:
    """Make pb_utils importable by Triton's names, also where they are not installed."""
    sys.modules.update(_ALIASES)
    if _SpellingHint not in sys.meta_path:
        sys.meta_path.insert(0, _SpellingHint)


def _without_modules() -> types.ModuleType:
    """Return pb_utils without its submodules, so that misspelt names (pb_utils.tensor) fail."""
    made = types.ModuleType("triton_python_backend_utils", pb_utils.__doc__)
    for name in (*pb_utils.__all__, "__all__", "__file__", "__getattr__", "__path__", "__spec__"):
        setattr(made, name, getattr(pb_utils, name))
    return made


_ALIASES = {
    "triton_python_backend_utils": _without_modules(),
    "c_python_backend_utils": c_module,
}


class _SpellingHint:
    """Import finder that raises a helpful error for misspelt names of pb_utils; finds nothing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG004
        root, inside, _ = name.partition(".")
        if root in _ALIASES:
            invented = bool(inside)
        else:
            invented = root.startswith("triton_python") and not PathFinder.find_spec(name, path)
        if invented:
            raise ModuleNotFoundError(
                f"No module named '{name}'; models write: import triton_python_backend_utils as "
                "pb_utils, which has Tensor, InferenceResponse and all else",
                name=name,
            )


def _make_package(name: str, folder: str) -> None:
    """Make the folder a package, with its ``__init__.py`` if it has one."""
    path = os.path.join(folder, "__init__.py")
    if os.path.isfile(path):
        spec = importlib.util.spec_from_file_location(
            name, path, loader=FreshLoader(name, path), submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None  # noqa: PT018
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        return
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [folder]


class FreshLoader(SourceFileLoader):
    """Loader that compiles a file each time: bytecode caches compare only size and second."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code of the file."""
        path = self.get_filename(fullname)
        code: types.CodeType = self.source_to_code(self.get_data(path), path)
        return code


def completed_config(kind: Any, name: str, config: str) -> str | None:
    """Return the configuration as completed by the model, in JSON; None if it completes none."""
    if not hasattr(kind, "auto_complete_config"):
        return None
    completed = kind.auto_complete_config(ModelConfig(config))
    if not isinstance(completed, ModelConfig):
        raise BridgeError(
            f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig "
            "object."
        )
    return json.dumps(completed.as_dict())


def answer_readiness(model: Any, run_coroutine: Callable[[Any], Any]) -> socket.socket | None:
    """Start a thread that answers the server's readiness checks with the model's ``is_ready``.

    ``run_coroutine`` runs coroutines. Returns the server's end of the socket, which the caller
    closes; None where the model has no ``is_ready``.
    """
    if not callable(getattr(model, "is_ready", None)):
        return None
    server, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(
        target=_answer, args=(ours, model, run_coroutine), name="readiness", daemon=True
    )
    thread.start()
    return server


def _answer(ours: socket.socket, model: Any, run_coroutine: Callable[[Any], Any]) -> None:
    # The server is gone after an OSError, and soon this process.
    with ours, contextlib.suppress(OSError):
        while ours.recv(1):
            ours.send(json.dumps(_ask(model, run_coroutine)).encode())


def _ask(model: Any, run_coroutine: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        # Looked up each time: a model may replace it.
        ready = model.is_ready()
        if inspect.iscoroutine(ready):
            ready = run_coroutine(ready)
    except BaseException as error:
        return {"ready": False, "error": model_error_text(error)[:_LONGEST_REASON]}
    if not isinstance(ready, bool):
        return {"ready": False, "error": "is_ready() must return a boolean value"}
    return {"ready": ready}


def wait_for_debugger(instance: str, port: int) -> None:
    """Listen for a debugger and return when it is attached; may raise BridgeError."""
    try:
        import debugpy  # noqa: PLC0415  (nothing else needs it)
    except ImportError as error:
        raise invalid(
            f"--debug-model: the interpreter of '{instance}' cannot import debugpy ({error}); "
            f"install it there: {sys.executable} -m pip install debugpy"
        ) from None
    try:
        address, bound = debugpy.listen((_ADDRESS, port))
    except (OSError, RuntimeError) as error:
        raise invalid(
            f"--debug-model: '{instance}' cannot listen for a debugger at {_ADDRESS}:{port}: "
            f"{error}; choose another port with --debug-model NAME:PORT"
        ) from None
    # A warning: no usual log level hides that the server waits.
    Logger.log_warn(f"waits for a debugger: attach it to {address}:{bound}")
    debugpy.wait_for_client()
    Logger.log_info("a debugger is attached")
