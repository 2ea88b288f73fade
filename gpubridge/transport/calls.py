"""Messages of the call channel: a model's calls of other models, its control requests, their answers.

This is a stub's second channel, which any of its threads may use. Rare messages carry a JSON object;
the others are packed little-endian structures::

    CALL            u8 kind, 3 pad, u32 calls, u64 batch * calls, request records; their tickets are the
                    calls' numbers, the batches those of the requests that they are made for, 0 for none,
                    with the bit `BLOCKS` where their ``execute`` waits for the answer
    CALL_RESPONSES  u8 kind, 3 pad, u32 responses, response records; their tickets are the calls' numbers

ASK is a control request: its fields are its number (``question``), its kind (``about``) and
arguments. ANSWER has the number and either an ``error`` or the result. GIVEN_UP says that the server
waits for no request of the stub any more: it is about to finalize the model. ARE_BLOCKING asks in which
of some ``calls`` an ``execute`` is blocked, and BLOCKING says in which.

References of a response name memory that is lent under tickets of the control page, like the memory
of requests that the stub executes. References of a call name either the stub's own output memory,
under its leases, or memory that was lent to the stub, under that ticket.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Sequence

from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import LONG_TEXT, without_long_texts
from gpubridge.transport.messages import LONGEST_CONTROL
from gpubridge.transport.records import Record, RecordReader, with_contexts


class CallKind:
    """First byte of a message of the call channel (0 is reserved for the channel itself)."""

    CALL = 1
    CANCEL = 2
    REGION = 3
    DROP_REGION = 4
    TAKEN = 5
    ASK = 6
    CLOSE_FAMILY = 7
    DEVICE_REGION = 8
    BLOCKING = 9
    CALL_RESPONSES = 16
    ANSWER = 17
    GIVEN_UP = 18
    ARE_BLOCKING = 19


BLOCKS = 1 << 63
"""In the number of a call's batch: its ``execute`` is blocked until the call is answered."""


_FRAME = struct.Struct("<BxxxI")
_ONE_CALL = struct.Struct("<BxxxIQ")
_PIECE = 1 << 20


def encode_records(kind: int, records: Sequence[bytes]) -> bytes:
    """Join encoded records to a message."""
    return b"".join((_FRAME.pack(kind, len(records)), *records))


def encode_calls(records: Sequence[bytes], batches: Sequence[int]) -> bytes:
    """Join encoded calls to a message; each is made for the requests of a batch, 0 for none."""
    count = len(records)
    if count == 1:
        return _ONE_CALL.pack(CallKind.CALL, 1, batches[0]) + records[0]
    return b"".join(
        (_FRAME.pack(CallKind.CALL, count), struct.pack(f"<{count}Q", *batches), *records)
    )


def decode_calls(message: bytes, reader: RecordReader) -> tuple[list[Record], Sequence[int]]:
    """Decode a message of calls, and the batch that each is made for; may raise MalformedMessage.

    The context of a call with long parameters has a memoryview of them, checked to be UTF-8.
    """
    texts: list[memoryview | None] = []

    def replace(context: memoryview) -> bytes:
        made, taken = without_long_texts(context, LONG_TEXT, ("parameters",))
        texts.append(taken.get("parameters"))
        return made

    view = memoryview(message)
    try:
        _, count = _FRAME.unpack_from(view)
        first = _FRAME.size + 8 * count
        if first > len(view):
            raise ValueError(f"the batches of {count} calls in {len(view)} bytes")
        batches = view[_FRAME.size : first].cast("Q").tolist()
        # Stubs send calls with long parameters one by one.
        if count == 1:
            parts, at = with_contexts(view, first, count, LONG_TEXT, replace, named=True)
            message = b"".join((view[:first], *parts, view[at:]))
        for text in filter(None, texts):
            check_utf8(text)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"message of calls: {error}") from error
    check_length(message)
    records = _decode(message, reader, first, count, named=True)
    if texts and texts[0] is not None:
        context = records[0].context.changed(parameters=texts[0])
        records = [records[0]._replace(context=context)]
    return records, batches


def check_length(message: bytes) -> None:
    """Raise MalformedMessage for a message that is longer than stubs may send."""
    if len(message) > LONGEST_CONTROL:
        text = f"message of kind {message[0]} of {len(message)} bytes (limit {LONGEST_CONTROL})"
        raise MalformedMessage(text)


def check_utf8(text: memoryview) -> None:
    """Raise ValueError unless the bytes are UTF-8; other threads run between the pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(text), _PIECE):
        decoder.decode(text[at : at + _PIECE])
    decoder.decode(b"", True)


def decode_records(message: bytes, reader: RecordReader) -> list[Record]:
    """Decode a message of responses to calls; may raise MalformedMessage."""
    try:
        _, count = _FRAME.unpack_from(message)
    except struct.error as error:
        raise MalformedMessage(f"message of calls: {error}") from error
    return _decode(message, reader, _FRAME.size, count, named=False)


def _decode(
    message: bytes, reader: RecordReader, first: int, count: int, *, named: bool
) -> list[Record]:
    try:
        records, at = reader.read(message, first, count, named)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"message of calls: {error}") from error
    if at != len(message):
        raise MalformedMessage(f"message of calls: {len(message) - at} bytes after its end")
    return records
