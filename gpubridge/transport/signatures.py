"""Signatures: the names, datatypes and shapes of a record's tensors.

Traffic repeats its signatures, so both sides remember what they parsed by the bytes: no field is
parsed twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor.dtypes import byte_size
from gpubridge.transport.channel import MalformedMessage

__all__ = ["MOST_TENSORS", "Signature", "SignatureCache", "TensorSpec", "encode_signature"]


MOST_TENSORS = 4096
"""A record has no more tensors than that."""
_DIM_LIMIT = 1 << 63
"""Dims beyond that fit neither into an array nor into an answer, even where another one is 0."""


class TensorSpec(NamedTuple):
    """Name, KServe datatype and shape of a tensor; ``nbytes`` is None where the data decide."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int | None


class Signature(NamedTuple):
    """What a signature says: the tensors of a record and, of a request, the outputs asked for."""

    tensors: tuple[TensorSpec, ...]
    requested: tuple[str, ...]


def encode_signature(
    tensors: Sequence[tuple[str, str, Sequence[int]]], requested: Sequence[str] = ()
) -> bytes:
    """Make the signature of tensors given as (name, datatype, shape).

    Raises
    ------
    BridgeError
        INVALID_ARG for more of them than the other process takes.
    """
    if len(tensors) > MOST_TENSORS:
        raise BridgeError(
            f"expected at most {MOST_TENSORS} tensors in a request or response, got {len(tensors)}",
            ErrorCode.INVALID_ARG,
        )
    fields: dict[str, Any] = {"t": [[name, kind, list(shape)] for name, kind, shape in tensors]}
    if requested:
        fields["o"] = list(requested)
    return json.dumps(fields, separators=(",", ":")).encode()


class SignatureCache(dict[bytes, Signature]):
    """What signatures say, by their bytes; bounded, so that odd traffic cannot make it grow.

    Raises
    ------
    MalformedMessage
        On looking up what is no signature.
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, raw: bytes) -> Signature:
        known = _parse_signature(raw)
        if len(self) >= self._limit:
            self.clear()
        self[raw] = known
        return known


def _parse_signature(raw: bytes) -> Signature:
    try:
        fields = json.loads(raw)
        tensors = []
        for name, datatype, shape in fields["t"]:
            dims = tuple(shape)
            if not isinstance(name, str) or not all(
                type(d) is int and 0 <= d < _DIM_LIMIT for d in dims
            ):
                raise ValueError(f"tensor {name!r} has shape {shape!r}")
            name.encode()  # A lone surrogate could be told to no client.
            nbytes = None if datatype == "BYTES" else byte_size(datatype, dims)
            tensors.append(TensorSpec(name, datatype, dims, nbytes))
        requested = tuple(fields.get("o", ()))
        if not all(isinstance(name, str) for name in requested):
            raise ValueError("an output's name is no string")
    except (
        BridgeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise MalformedMessage(f"signature {raw[:200]!r}: {error!r}") from error
    return Signature(tuple(tensors), requested)
