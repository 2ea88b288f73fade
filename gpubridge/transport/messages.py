"""The messages between the server and a stub: their kinds, and the layout of those of the hot path.

The first byte of every message is its kind. Rare messages carry a JSON object after it. The two that
carry requests and responses are packed little-endian structures::

    EXECUTE   frame   u8 kind, 3 pad, u32 batches
              batch   u64 sequence, u32 requests, 4 pad
              request u32 ticket, u32 |signature|, u32 |extras|, u32 |id|, u32 tensors
                      signature, extras, id, tensor reference * tensors
    RESULTS   frame   u8 kind, 3 pad, u32 batches
              batch   u64 sequence, u64 started ns, u64 ended ns, u64 bytes copied, u32 responses, 4 pad
              response u32 ticket, u32 |signature|, u32 |extras|, u32 flags, u32 tensors
                      signature, extras, tensor reference * tensors
    tensor reference  u64 region, u64 offset, u64 nbytes, u32 lease

A *signature* says the names, dtypes and shapes of a record's tensors as JSON. Traffic repeats its
signatures, so both sides remember what they parsed by the bytes: no field is parsed twice. *Extras*
are a JSON object, absent (empty) in most records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

from gpubridge.errors import BridgeError
from gpubridge.tensor.dtypes import byte_size
from gpubridge.transport.channel import MalformedMessage

__all__ = [
    "Batch",
    "Kind",
    "Record",
    "ResponseFlag",
    "Signature",
    "SignatureCache",
    "TensorRef",
    "TensorSpec",
    "control_message",
    "decode_control",
    "decode_execute",
    "decode_results",
    "encode_batch",
    "encode_frame",
    "encode_record",
    "encode_result_batch",
    "encode_signature",
]

Buffer = Union[memoryview, bytes]


class Kind:
    """The first byte of a message (0 is the channel's own)."""

    INITIALIZE = 1
    EXECUTE = 2
    REGION = 3
    DROP_REGION = 4
    TRIM = 5
    FINALIZE = 6
    READY = 16
    FAILED = 17
    RESULTS = 18
    LOG = 19
    FINALIZED = 20


class ResponseFlag:
    """Bits of a response record."""

    ERROR = 1
    CANCELLED = 2


class TensorRef(NamedTuple):
    """Where a tensor's bytes lie, and under which lease they are lent."""

    region: int
    offset: int
    nbytes: int
    lease: int


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


class Record(NamedTuple):
    """A request or a response as it crosses; ``word`` is |id| of a request, flags of a response."""

    ticket: int
    signature: Signature
    extras: dict[str, Any] | None
    word: int
    identifier: str
    refs: Sequence[TensorRef]


class Batch(NamedTuple):
    """A batch and its records; times and copies are those of a result."""

    sequence: int
    records: list[Record]
    started: int = 0
    ended: int = 0
    copied: int = 0


_FRAME = struct.Struct("<BxxxI")
_BATCH = struct.Struct("<QI4x")
_RESULT = struct.Struct("<QQQQI4x")
_RECORD = struct.Struct("<IIIII")
_REF = "QQQI"
_MAX_TENSORS = 4096
_TENSOR_REF = struct.Struct("<" + _REF)
_PLAIN_LIMIT = 1024
_PLAIN_RECORDS: dict[tuple[int, int], Callable[..., bytes]] = {}
_REFS = [struct.Struct("<" + _REF * count) for count in range(9)]


def control_message(kind: int, **fields: Any) -> bytes:
    """Make a message of a rare kind from its fields."""
    return bytes((kind,)) + json.dumps(fields, separators=(",", ":")).encode()


def decode_control(message: Buffer) -> dict[str, Any]:
    """Return the fields of a message of a rare kind.

    Raises
    ------
    MalformedMessage
        When it holds no JSON object.
    """
    return _json_object(bytes(message[1:]), f"message of kind {message[0]}")


def _json_object(raw: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"{what}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage(f"{what}: expected a JSON object, got {type(fields).__name__}")
    return fields


def encode_signature(
    tensors: Sequence[tuple[str, str, Sequence[int]]], requested: Sequence[str] = ()
) -> bytes:
    """Make the signature of tensors given as (name, datatype, shape)."""
    fields: dict[str, Any] = {"t": [[name, kind, list(shape)] for name, kind, shape in tensors]}
    if requested:
        fields["o"] = list(requested)
    return json.dumps(fields, separators=(",", ":")).encode()


class SignatureCache:
    """Parses signatures, each once; bounded, so that odd traffic cannot make it grow."""

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = 4096) -> None:
        self._known: dict[bytes, Signature] = {}
        self._limit = limit

    def parse(self, raw: bytes) -> Signature:
        """Return what ``raw`` says.

        Raises
        ------
        MalformedMessage
            When it is no signature.
        """
        known = self._known.get(raw)
        if known is None:
            known = _parse_signature(raw)
            if len(self._known) >= self._limit:
                self._known.clear()
            self._known[raw] = known
        return known


def encode_frame(kind: int, batches: Sequence[bytes]) -> bytes:
    """Join encoded batches to a message of kind EXECUTE or RESULTS."""
    return b"".join((_FRAME.pack(kind, len(batches)), *batches))


def encode_batch(sequence: int, records: Sequence[bytes]) -> bytes:
    """Join encoded requests to a batch of an EXECUTE message."""
    return b"".join((_BATCH.pack(sequence, len(records)), *records))


def encode_result_batch(
    sequence: int, started: int, ended: int, copied: int, records: Sequence[bytes]
) -> bytes:
    """Join encoded responses to a batch of a RESULTS message."""
    return b"".join((_RESULT.pack(sequence, started, ended, copied, len(records)), *records))


def encode_record(
    ticket: int,
    signature: bytes,
    refs: Sequence[int],
    word: int = 0,
    identifier: bytes = b"",
    extras: bytes = b"",
) -> bytes:
    """Make the record of a request or a response.

    Parameters
    ----------
    refs : sequence of int
        The fields of all its tensor references, one after another.
    word : int
        Flags of a response; of a request its identifier's length is put there.
    """
    count = len(refs) >> 2
    signed = len(signature)
    if not extras and not identifier and count < len(_REFS):
        # Most records: one structure holds all of it.
        pack = _PLAIN_RECORDS.get((signed, count))
        if pack is None:
            if len(_PLAIN_RECORDS) >= _PLAIN_LIMIT:
                _PLAIN_RECORDS.clear()
            pack = struct.Struct(f"{_RECORD.format}{signed}s{_REF * count}").pack
            _PLAIN_RECORDS[signed, count] = pack
        return pack(ticket, signed, 0, word, count, signature, *refs)
    pack = (_REFS[count] if count < len(_REFS) else struct.Struct("<" + _REF * count)).pack
    head = _RECORD.pack(ticket, signed, len(extras), word or len(identifier), count)
    return b"".join((head, signature, extras, identifier, pack(*refs)))


def decode_execute(message: Buffer, signatures: SignatureCache) -> list[Batch]:
    """Take an EXECUTE message apart.

    Raises
    ------
    MalformedMessage
        When a length or a count does not fit.
    """
    message = bytes(message)
    try:
        _, count = _FRAME.unpack_from(message)
        at = _FRAME.size
        batches = []
        for _ in range(count):
            sequence, requests = _BATCH.unpack_from(message, at)
            records, at = _decode_records(message, at + _BATCH.size, requests, signatures, True)
            batches.append(Batch(sequence, records))
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"EXECUTE message: {error}") from error
    return batches


def decode_results(message: Buffer, signatures: SignatureCache) -> list[Batch]:
    """Take a RESULTS message apart.

    Raises
    ------
    MalformedMessage
        When a length or a count does not fit.
    """
    message = bytes(message)
    try:
        _, count = _FRAME.unpack_from(message)
        at = _FRAME.size
        batches = []
        for _ in range(count):
            sequence, started, ended, copied, responses = _RESULT.unpack_from(message, at)
            records, at = _decode_records(message, at + _RESULT.size, responses, signatures, False)
            batches.append(Batch(sequence, records, started, ended, copied))
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"RESULTS message: {error}") from error
    if at != len(message):
        raise MalformedMessage(f"RESULTS message: {len(message) - at} bytes after its end")
    return batches


def _decode_records(
    message: bytes, at: int, count: int, signatures: SignatureCache, named: bool
) -> tuple[list[Record], int]:
    records = []
    parse = signatures.parse
    for _ in range(count):
        ticket, signed, extra, word, tensors = _RECORD.unpack_from(message, at)
        if tensors > _MAX_TENSORS:
            raise MalformedMessage(f"a record of {tensors} tensors came (limit {_MAX_TENSORS})")
        at += _RECORD.size
        signature = parse(message[at : at + signed])
        at += signed
        extras = None
        if extra:
            extras = _json_object(bytes(message[at : at + extra]), "extras of a record")
            at += extra
        identifier = ""
        if named and word:
            identifier = str(message[at : at + word], "utf-8")
            at += word
        end = at + _TENSOR_REF.size * tensors
        refs: list[Any] = list(_TENSOR_REF.iter_unpack(message[at:end]))
        at = end
        if len(refs) != tensors:
            raise MalformedMessage(f"a record of {tensors} tensors ends after {len(refs)}")
        if tensors != len(signature.tensors):
            raise MalformedMessage(
                f"a record of {tensors} tensors came with a signature of {len(signature.tensors)}"
            )
        records.append(Record(ticket, signature, extras, word, identifier, refs))
    return records, at


def _parse_signature(raw: bytes) -> Signature:
    try:
        fields = json.loads(raw)
        tensors = []
        for name, datatype, shape in fields["t"]:
            dims = tuple(shape)
            if not isinstance(name, str) or not all(type(d) is int and d >= 0 for d in dims):
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
