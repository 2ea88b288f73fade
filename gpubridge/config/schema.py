"""The protobuf schema of ``config.pbtxt``: tritonclient's generated ``model_config_pb2``.

The module lies inside the package ``tritonclient.grpc``, whose ``__init__`` imports grpc. Measured
on CPython 3.11, protobuf 6.33: the generated file alone costs 25 to 45 ms and 7 to 10 MiB, through
its package 290 ms and 40 MiB, and without grpcio installed the package cannot be imported at all.
So the file is found beside the installed package and executed by itself.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["ProtoMessage", "model_config_schema"]

ProtoMessage = Any
"""A protobuf message: its attributes come from a descriptor at run time, unseen by checkers."""

_MODULE_NAME = "gpubridge.config._model_config_pb2"


@functools.cache
def model_config_schema() -> ModuleType:
    """Return the generated module that defines ``ModelConfig``, loaded once.

    The classes are those of ``tritonclient.grpc`` itself, whether that package is imported before,
    after, or never: both register the same bytes in protobuf's default descriptor pool, which
    keeps one descriptor, and one class per descriptor.

    Raises
    ------
    BridgeError
        ``INTERNAL`` when tritonclient is not installed, or was generated for a newer protobuf.
    """
    path = _generated_file()
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise BridgeError(f"cannot load the schema of config.pbtxt from {path}", ErrorCode.INTERNAL)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # protobuf's VersionError is private to its runtime_version module
        raise BridgeError(
            f"cannot load the schema of config.pbtxt from {path}: {error}; "
            "install a protobuf that matches it: pip install --upgrade protobuf tritonclient",
            ErrorCode.INTERNAL,
        ) from error
    return module


def _generated_file() -> Path:
    package = importlib.util.find_spec("tritonclient")
    for location in (package.submodule_search_locations or []) if package else []:
        candidate = Path(location) / "grpc" / "model_config_pb2.py"
        if candidate.is_file():
            return candidate
    raise BridgeError(
        "config.pbtxt cannot be read: the schema tritonclient/grpc/model_config_pb2.py is not "
        "installed; run: pip install tritonclient",
        ErrorCode.INTERNAL,
    )
