"""Signatures: the names, datatypes and ranks of a record's tensors, without their dims.

Requests repeat signatures, so both sides cache parsed ones by their bytes. Since dims are separate, a
new shape does not make a new signature.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from gpubridge.errors import BridgeError, invalid
from gpubridge.tensor.datatypes import item_size
from gpubridge.transport.channel import MalformedMessage

MOST_TENSORS = 4096
"""Largest number of tensors of a record."""
_SIZE_LIMIT = 1 << 63
"""Exclusive limit of a dim and of the bytes of a tensor."""
_RANK_LIMIT = 1 << 32
_DIM_BYTES = 8
_PACK_DIMS = [struct.Struct(f"<{count}q").pack for count in range(33)]
Shapes = tuple[tuple[int, ...], ...]
"""Shapes of a record's tensors, in their order."""


class TensorSpec(NamedTuple):
    """Name, KServe datatype and rank of a tensor; ``itemsize`` is None for BYTES."""

    name: str
    datatype: str
    rank: int
    itemsize: int | None

    def nbytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of a tensor of this shape; None for BYTES."""
        return None if self.itemsize is None else self.itemsize * prod(shape)


class Signature(NamedTuple):
    """Tensors of a record; for a request also the requested outputs, in order and as a set."""

    tensors: tuple[TensorSpec, ...]
    requested: tuple[str, ...]
    wanted: frozenset[str] = frozenset()


def encode_signature(
    tensors: Sequence[tuple[str, str, int]], requested: Sequence[str] = ()
) -> bytes:
    """Encode the signature of tensors (name, datatype, rank); BridgeError for too many."""
    if len(tensors) > MOST_TENSORS:
        raise invalid(
            f"expected at most {MOST_TENSORS} tensors in a request or response, got {len(tensors)}"
        )
    fields: dict[str, Any] = {"t": tensors}
    if requested:
        fields["o"] = list(requested)
    return json.dumps(fields, separators=(",", ":")).encode()


def encode_dims(shapes: Sequence[Sequence[int]]) -> bytes:
    """Encode the dims of all shapes, one after another."""
    dims = [dim for shape in shapes for dim in shape]
    if len(dims) < len(_PACK_DIMS):
        return _PACK_DIMS[len(dims)](*dims)
    return struct.pack(f"<{len(dims)}q", *dims)


def encode_tensors(
    tensors: Sequence[tuple[str, str, Sequence[int]]], requested: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """Encode signature and dims of tensors (name, datatype, shape); raises as `encode_signature`."""
    described = [(name, datatype, len(shape)) for name, datatype, shape in tensors]
    signature = encode_signature(described, requested)
    return signature, encode_dims([shape for _, _, shape in tensors])


def shapes_of(tensors: Sequence[TensorSpec], dims: Sequence[int]) -> Shapes:
    """Split dims into the shapes of tensors.

    Raises ValueError for a wrong number of dims, a negative dim, or a tensor of 2**63 bytes or more.
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
    """Decode the shapes of a signature's tensors; raises as `shapes_of`."""
    return shapes_of(signature.tensors, struct.unpack(f"<{len(dims) // _DIM_BYTES}q", dims))


class SignatureCache(dict[bytes, Signature]):
    """Bounded cache of signatures by their bytes. Raises MalformedMessage for invalid bytes."""

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
    """Decode a signature; may raise MalformedMessage."""
    try:
        fields = json.loads(raw)
        tensors = []
        for name, datatype, rank in fields["t"]:
            if not isinstance(name, str) or type(rank) is not int or not 0 <= rank < _RANK_LIMIT:
                raise ValueError(f"tensor {name!r} has rank {rank!r}")
            name.encode()  # A lone surrogate could not be sent to a client.
            tensors.append(TensorSpec(name, datatype, rank, item_size(datatype)))
        requested = tuple(fields.get("o", ()))
        if not all(isinstance(name, str) for name in requested):
            raise ValueError("an output's name is no string")
    except (BridgeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MalformedMessage(f"signature {raw[:200]!r}: {error!r}") from error
    return Signature(tuple(tensors), requested, frozenset(requested))
