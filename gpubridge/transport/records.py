"""Records of requests and responses inside messages: encoding and decoding.

The compiled module has a reader and a writer of the same layout as those here::

    request   u32 ticket, u32 |signature|, u32 |context|, u32 |id|, u32 tensors, u32 dims
              signature, context, id, i64 dim * dims, tensor reference * tensors
    response  u32 ticket, u32 |signature|, u32 |context|, u32 flags, u32 tensors, u32 dims
              signature, context, i64 dim * dims, tensor reference * tensors
    tensor reference  u64 region, u64 offset, u64 nbytes, u32 lease

The dims are those of all tensors, one after another; the signature has the rank of each tensor. The
context is encoded as in `gpubridge.transport.context`, and empty in most records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpubridge.tensor.native import native
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import Context, PythonContextCodec, context_codec, opened_for
from gpubridge.transport.signatures import (
    MOST_TENSORS,
    Shapes,
    Signature,
    SignatureCache,
    parse_signature,
    shapes_of,
)


class TensorRef(NamedTuple):
    """Location of a tensor's bytes, and their lease."""

    region: int
    offset: int
    nbytes: int
    lease: int


class Record(NamedTuple):
    """A decoded request or response; ``word`` is the length of a request's id, or response flags."""

    ticket: int
    signature: Signature
    shapes: Shapes
    context: Any
    word: int
    identifier: str
    refs: Sequence[TensorRef]


_RECORD = struct.Struct("<IIIIII")
_DIM_BYTES = 8
_REF = "QQQI"
_TENSOR_REF = struct.Struct("<" + _REF)
_REFS = [struct.Struct("<" + _REF * count) for count in range(9)]


def json_object(raw: bytes | str, what: str) -> dict[str, Any]:
    """Parse a JSON object; MalformedMessage for anything else."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"{what}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage(f"{what}: expected a JSON object, got {type(fields).__name__}")
    return fields


def record_encoder() -> Callable[..., bytes]:
    """Return the function that encodes records: the compiled one where there is a module."""
    compiled = native()
    return _encode_record if compiled is None else compiled.encode_record


def _encode_record(  # noqa: PLR0913  (the parts of a record)
    ticket: int,
    signature: bytes,
    dims: bytes,
    refs: Sequence[int],
    word: int = 0,
    identifier: bytes = b"",
    context: bytes = b"",
) -> bytes:
    count = len(refs) >> 2
    pack = (_REFS[count] if count < len(_REFS) else struct.Struct("<" + _REF * count)).pack
    head = _RECORD.pack(
        ticket,
        len(signature),
        len(context),
        word or len(identifier),
        count,
        len(dims) // _DIM_BYTES,
    )
    return b"".join((head, signature, context, identifier, dims, pack(*refs)))


def record_reader(kind: type[Context]) -> RecordReader:
    """Return a reader of one peer's records with contexts of ``kind``: compiled where possible."""
    compiled = native()
    if compiled is None:
        return RecordReader(PythonContextCodec(kind))
    reader: RecordReader = compiled.RecordReader(parse_signature, context_codec(kind), Record)
    return reader


def with_contexts(
    message: memoryview,
    at: int,
    count: int,
    longest: int,
    replace: Callable[[memoryview], bytes],
    *,
    named: bool = False,
) -> tuple[list[bytes | memoryview], int]:
    """Replace contexts of more than ``longest`` bytes in records (``named``: of requests).

    Returns the new records in parts, and the end of the old ones in the message. Raises ValueError or
    struct.error for truncated records.
    """
    parts: list[bytes | memoryview] = []
    for _ in range(count):
        ticket, signed, said, word, tensors, dims = _RECORD.unpack_from(message, at)
        context = at + _RECORD.size + signed
        end = context + said + _DIM_BYTES * dims + _TENSOR_REF.size * tensors
        end += word if named else 0
        if end > len(message):
            raise ValueError(_CUT)
        if said > longest:
            made = replace(message[context : context + said])
            parts += (
                _RECORD.pack(ticket, signed, len(made), word, tensors, dims),
                message[at + _RECORD.size : context],
                made,
                message[context + said : end],
            )
        else:
            parts.append(message[at:end])
        at = end
    return parts, at


def with_long_text(
    record: bytes, name: str, text: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """Add a text, given in pieces, to the context of a response record; returns it in pieces."""
    ticket, signed, said, word, tensors, dims = _RECORD.unpack_from(record)
    begin = _RECORD.size + signed
    end = begin + said
    nbytes = sum(map(len, text))
    before, after = opened_for(record[begin:end], name, nbytes)
    said = len(before) + nbytes + len(after)
    head = _RECORD.pack(ticket, signed, said, word, tensors, dims)
    return [head + record[_RECORD.size : begin] + before, *text, after + record[end:]]


class RecordReader:
    """Decodes records; the compiled module has an equivalent class."""

    __slots__ = ("_codec", "_signatures")

    def __init__(self, codec: PythonContextCodec) -> None:
        self._signatures = SignatureCache()
        self._codec = codec

    def read(self, message: bytes, at: int, count: int, named: bool, /) -> tuple[list[Record], int]:
        """Decode ``count`` records from ``at`` on; returns them and their end. May raise ValueError."""
        records = []
        signatures = self._signatures
        for _ in range(count):
            if len(message) - at < _RECORD.size:
                raise ValueError(_CUT)
            ticket, signed, said, word, tensors, dims = _RECORD.unpack_from(message, at)
            if tensors > MOST_TENSORS:
                raise ValueError(f"a record of {tensors} tensors came (limit {MOST_TENSORS})")
            at += _RECORD.size
            signature = signatures[message[at : at + signed]]
            at += signed
            if at + said > len(message):
                raise ValueError(_CUT)
            context = self._codec.decode(message[at : at + said])
            at += said
            identifier = ""
            if named and word:
                identifier = str(message[at : at + word], "utf-8")
                at += word
            end = at + _DIM_BYTES * dims + _TENSOR_REF.size * tensors
            if end > len(message):
                raise ValueError(_CUT)
            numbers = struct.unpack_from(f"<{dims}q", message, at)
            at += _DIM_BYTES * dims
            refs: list[Any] = list(_TENSOR_REF.iter_unpack(message[at:end]))
            at = end
            if tensors != len(signature.tensors):
                raise ValueError(
                    f"a record of {tensors} tensors came with a signature of "
                    f"{len(signature.tensors)}"
                )
            shapes = shapes_of(signature.tensors, numbers)
            records.append(Record(ticket, signature, shapes, context, word, identifier, refs))
        return records, at


_CUT = "it ends in the middle of a record"
