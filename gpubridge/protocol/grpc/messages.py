"""The v2 protocol's protobuf messages: the schema in tritonclient's generated ``service_pb2``.

Executing that file would import the package ``tritonclient.grpc``, and so grpc: 290 ms, 40 MiB, and
impossible where grpcio is not installed. Its descriptor is one bytes literal, so it is read from the
file's syntax tree and the classes are made from it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pool,
    message,
    message_factory,
)

from gpubridge.config.schema import ProtoMessage, model_config_schema
from gpubridge.errors import BridgeError, ErrorCode

MALFORMED = "Unable to parse request"
"""Triton's error for bytes that are no message."""


@functools.cache
def message_class(name: str) -> ProtoMessage:
    """Return the class of a message of the package ``inference``, such as ``ModelInferRequest``.

    The classes are those of ``tritonclient.grpc`` itself, whether that package is imported before,
    after, or never.

    Raises BridgeError: ``INTERNAL`` when tritonclient is not installed, or was generated for
    another protobuf.
    """
    _add_schema()
    pool = descriptor_pool.Default()
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))


def parse_message(name: str, data: bytes) -> ProtoMessage:
    """Parse a request's message; raises BridgeError."""
    try:
        return message_class(name).FromString(data)
    except message.DecodeError as error:
        raise BridgeError(MALFORMED, ErrorCode.INTERNAL) from error


def encode_message(name: str, /, **fields: Any) -> bytes:
    """Return the bytes of a message with these fields."""
    encoded: bytes = message_class(name)(**fields).SerializeToString(deterministic=True)
    return encoded


@functools.cache
def _add_schema() -> None:
    """Register the schema in protobuf's default pool; the same bytes twice do no harm."""
    model_config_schema()
    path = _generated_file()
    try:
        descriptor_pool.Default().AddSerializedFile(_descriptor(path))
    except (SyntaxError, ValueError, TypeError) as error:
        raise BridgeError(
            f"cannot load the schema of the gRPC protocol from {path}: {error}; "
            "install matching releases: pip install --upgrade protobuf tritonclient",
            ErrorCode.INTERNAL,
        ) from error


def _descriptor(path: Path) -> bytes:
    """Return the serialised FileDescriptorProto in a generated file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "AddSerializedFile"
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, bytes)
        ):
            return node.args[0].value
    raise ValueError("it adds no serialised descriptor")


def _generated_file() -> Path:
    package = importlib.util.find_spec("tritonclient")
    for location in (package.submodule_search_locations or []) if package else []:
        candidate = Path(location) / "grpc" / "service_pb2.py"
        if candidate.is_file():
            return candidate
    raise BridgeError(
        "gRPC cannot be served: the schema tritonclient/grpc/service_pb2.py is not installed; run: "
        "pip install tritonclient",
        ErrorCode.INTERNAL,
    )
