"""Signatures: the names, datatypes and ranks of a record's tensors; their dims travel beside it.

Traffic repeats its signatures, so both sides remember what they parsed by the bytes: no field is
parsed twice. Since the dims are apart, a new shape is no new signature.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError, invalid
from gpubridge.tensor.dtypes import item_size
from gpubridge.transport.channel import MalformedMessage

MOST_TENSORS = 4096
"""A record has no more tensors than that."""
_SIZE_LIMIT = 1 << 63
"""Neither a dim nor the bytes of a tensor may reach it; without elements a tensor has 0 bytes."""
_RANK_LIMIT = 1 << 32
_DIM_BYTES = 8
_PACK_DIMS = [struct.Struct(f"<{count}q").pack for count in range(33)]
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a record's tensors, in their order."""


class TensorSpec(NamedTuple):
    """Name, KServe datatype and rank of a tensor; ``itemsize`` is None for BYTES."""

    name: str
    datatype: str
    rank: int
    itemsize: int | None

    def nbytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of such a tensor of some shape; None where the data decide."""
        return None if self.itemsize is None else self.itemsize * prod(shape)


class Signature(NamedTuple):
    """The tensors of a record and, of a request, the outputs asked for, also to look them up."""

    tensors: tuple[TensorSpec, ...]
    requested: tuple[str, ...]
    wanted: frozenset[str] = frozenset()


def encode_signature(
    tensors: Sequence[tuple[str, str, int]], requested: Sequence[str] = ()
) -> bytes:
    """Make the signature of tensors given as (name, datatype, rank); BridgeError for too many."""
    if len(tensors) > MOST_TENSORS:
        raise invalid(
            f"expected at most {MOST_TENSORS} tensors in a request or response, got {len(tensors)}"
        )
    fields: dict[str, Any] = {"t": tensors}
    if requested:
        fields["o"] = list(requested)
    return json.dumps(fields, separators=(",", ":")).encode()


def encode_dims(shapes: Sequence[Sequence[int]]) -> bytes:
    """Write the dims of all shapes, one after another, as a record has them."""
    dims = [dim for shape in shapes for dim in shape]
    if len(dims) < len(_PACK_DIMS):
        return _PACK_DIMS[len(dims)](*dims)
    return struct.pack(f"<{len(dims)}q", *dims)


def encode_tensors(
    tensors: Sequence[tuple[str, str, Sequence[int]]], requested: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """Make signature and dims of tensors (name, datatype, shape); raises as `encode_signature`."""
    described = [(name, datatype, len(shape)) for name, datatype, shape in tensors]
    signature = encode_signature(described, requested)
    return signature, encode_dims([shape for _, _, shape in tensors])


def shapes_of(tensors: Sequence[TensorSpec], dims: Sequence[int]) -> Shapes:
    """Return the shapes of tensors whose dims come one after another.

    Raises ValueError for more or fewer dims, a negative one, or more bytes than 63 bits count.
    """
    shapes = []
    at = 0
    for spec in tensors:
        end = at + spec.rank
        shape = tuple(dims[at:end])
        if shape and (min(shape) < 0 or (spec.itemsize or 1) * prod(shape) >= _SIZE_LIMIT):
            raise ValueError("a tensor has a negative dim, or more bytes than 63 bits count")
        shapes.append(shape)
        at = end
    if at != len(dims):
        raise ValueError(f"a record of {len(dims)} dims came with a signature of {at}")
    return tuple(shapes)


def decode_shapes(signature: Signature, dims: bytes) -> Shapes:
    """Return the shapes of a signature's tensors from their encoded dims; raises as `shapes_of`."""
    return shapes_of(signature.tensors, struct.unpack(f"<{len(dims) // _DIM_BYTES}q", dims))


class SignatureCache(dict[bytes, Signature]):
    """Decoded signatures by their bytes; bounded. Raises MalformedMessage for invalid bytes."""

    __slots__ = ("_limit",)

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, raw: bytes) -> Signature:
        known = parse_signature(raw)
        if len(self) >= self._limit:
            self.clear()
        self[raw] = known
        return known


def parse_signature(raw: bytes) -> Signature:
    """Return what a signature's bytes say; MalformedMessage when it is none."""
    try:
        fields = json.loads(raw)
        tensors = []
        for name, datatype, rank in fields["t"]:
            if not isinstance(name, str) or type(rank) is not int or not 0 <= rank < _RANK_LIMIT:
                raise ValueError(f"tensor {name!r} has rank {rank!r}")
            name.encode()  # A lone surrogate could be told to no client.
            tensors.append(TensorSpec(name, datatype, rank, item_size(datatype)))
        requested = tuple(fields.get("o", ()))
        if not all(isinstance(name, str) for name in requested):
            raise ValueError("an output's name is no string")
    except (BridgeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedMessage(f"signature {raw[:200]!r}: {error!r}") from error
    return Signature(tuple(tensors), requested, frozenset(requested))
