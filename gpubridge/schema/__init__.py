"""Protobuf messages of the v2 protocol and of ``config.pbtxt``, in a descriptor pool of their own.

``model_config.proto`` and ``grpc_service.proto`` are compiled into ``v2.binpb``, a serialised
``FileDescriptorSet``::

    python -m grpc_tools.protoc -I . --include_imports --descriptor_set_out=v2.binpb grpc_service.proto

The classes are made from it at run time, so protobuf 5 to 7 serve, no generated code has to match
the release of protobuf, and the messages of tritonclient may be imported beside them.
"""

from __future__ import annotations

import functools
import threading
from importlib import resources
from typing import Any

from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message_factory,
)

ProtoMessage = Any
"""A protobuf message: its attributes come from a descriptor at run time, unseen by checkers."""


_LOADING = threading.Lock()


def schema_pool() -> Any:
    """Return the descriptor pool of the package ``inference``: the same one in all threads."""
    with _LOADING:
        return _load_pool()


@functools.cache
def _load_pool() -> Any:
    files = descriptor_pb2.FileDescriptorSet.FromString(
        resources.files(__name__).joinpath("v2.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


@functools.cache
def message_class(name: str) -> ProtoMessage:
    """Return the class of a message of the package ``inference``, such as ``ModelInferRequest``."""
    found = schema_pool().FindMessageTypeByName(f"inference.{name}")
    return message_factory.GetMessageClass(found)


def enum_name(enum: str, number: int) -> str:
    """Return the name of a value of an enum, such as ``ModelInstanceGroup.Kind``; empty if unknown."""
    value = schema_pool().FindEnumTypeByName(f"inference.{enum}").values_by_number.get(number)
    return "" if value is None else str(value.name)
