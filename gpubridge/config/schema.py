"""The protobuf schema of ``config.pbtxt``: tritonclient's generated ``model_config_pb2``.

The module lies inside the package ``tritonclient.grpc``, whose ``__init__`` imports grpc. Measured
on CPython 3.11, protobuf 6.33: the generated file alone costs 25 to 45 ms and 7 to 10 MiB, through
its package 290 ms and 40 MiB, and without grpcio installed the package cannot be imported at all.
So the file is found beside the installed package and executed by itself.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import MutableMapping, MutableSequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]

from gpubridge.errors import BridgeError, ErrorCode

ProtoMessage = Any
"""A protobuf message: its attributes come from a descriptor at run time, unseen by checkers."""

_MODULE_NAME = "gpubridge.config._model_config_pb2"
JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]

# Triton turns 64-bit integers into numbers field by field; these it leaves as protobuf's text.
_INT64_AS_TEXT = frozenset(
    {
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelSequenceBatching.InitialState.dims",
    }
)

# Integral floats are printed without a fraction; beyond this a float no longer counts in ones.
_EXACT_INTEGER_LIMIT = 2**53


@functools.cache
def model_config_schema() -> ModuleType:
    """Return the generated module that defines ``ModelConfig``, loaded once; or raise INTERNAL.

    The classes are those of ``tritonclient.grpc`` itself, whether that package is imported before,
    after, or never: both register the same bytes in protobuf's default descriptor pool, which keeps
    one descriptor, and one class per descriptor.
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


def message_to_triton_json(message: ProtoMessage) -> dict[str, JsonValue]:
    """Return `message` as the JSON object that Triton's config endpoint would print, in its order.

    Fields with presence (messages, members of a oneof) appear only when set; all others appear with
    their defaults. Enums are names.
    """
    result: dict[str, JsonValue] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        # By container type: FieldDescriptor.label is deprecated, is_repeated is missing before it.
        if isinstance(value, MutableMapping):
            entry = field.message_type.fields_by_name["value"]
            result[field.name] = {str(key): _one_value(entry, value[key]) for key in value}
        elif isinstance(value, MutableSequence):
            result[field.name] = [_one_value(field, item) for item in value]
        else:
            result[field.name] = _one_value(field, value)
    return result


def _one_value(field: FieldDescriptor, value: ProtoMessage) -> JsonValue:
    if field.message_type is not None:
        return message_to_triton_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return int(value) if known is None else str(known.name)
    if field.full_name in _INT64_AS_TEXT:
        return str(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        # 0.1 stored as a float32 must print as 0.1, not as 0.10000000149011612.
        value = float(str(np.float32(value)))
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGER_LIMIT:
        return int(value)
    return value  # type: ignore[no-any-return]
