"""The messages of the call channel: a model's calls of other models, its questions, their answers.

A stub has a second channel for them, which any of its threads may use. Rare messages carry a JSON
object; the others are, packed little-endian::

    CALL            u8 kind, 3 pad, u32 1, a request record; its ticket is the call's number
    CALL_RESPONSES  u8 kind, 3 pad, u32 responses, response records; their tickets are the calls' numbers

ASK has what a model asks of the server besides calls of other models, and waits for: its fields are the
number of the question, ``about``, and what that needs. ANSWER has the number and, unless it has an
``error``, what was asked for.

The memory that a response's references name is lent under tickets of the control page, like that of
the requests that the stub executes. What a call's references name is either the stub's own output
memory, under its leases, or memory that was lent to it, under the ticket that it has it by.
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
    """The first byte of a message of the call channel (0 is the channel's own)."""

    CALL = 1
    CANCEL = 2
    REGION = 3
    DROP_REGION = 4
    TAKEN = 5
    ASK = 6
    CLOSE_FAMILY = 7
    DEVICE_REGION = 8
    CALL_RESPONSES = 16
    ANSWER = 17


_FRAME = struct.Struct("<BxxxI")
_PIECE = 1 << 20


def encode_records(kind: int, records: Sequence[bytes]) -> bytes:
    """Join encoded records to a message."""
    return b"".join((_FRAME.pack(kind, len(records)), *records))


def decode_calls(message: bytes, reader: RecordReader) -> list[Record]:
    """Take a message of calls apart; or raise MalformedMessage.

    The context of a call with long parameters has a memoryview of these: UTF-8, as was checked.
    """
    texts: list[memoryview | None] = []

    def replace(context: memoryview) -> bytes:
        made, taken = without_long_texts(context, LONG_TEXT, ("parameters",))
        texts.append(taken.get("parameters"))
        return made

    view = memoryview(message)
    try:
        _, count = _FRAME.unpack_from(view)
        # A stub sends long ones one by one.
        if count == 1:
            parts, at = with_contexts(view, _FRAME.size, count, LONG_TEXT, replace, named=True)
            message = b"".join((view[: _FRAME.size], *parts, view[at:]))
        for text in filter(None, texts):
            check_utf8(text)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"message of calls: {error}") from error
    check_length(message)
    records = decode_records(message, reader, named=True)
    if texts and texts[0] is not None:
        context = records[0].context.changed(parameters=texts[0])
        return [records[0]._replace(context=context)]
    return records


def check_length(message: bytes) -> None:
    """Raise MalformedMessage for a message that no stub sends, since it would refuse it itself."""
    if len(message) > LONGEST_CONTROL:
        text = f"message of kind {message[0]} of {len(message)} bytes (limit {LONGEST_CONTROL})"
        raise MalformedMessage(text)


def check_utf8(text: memoryview) -> None:
    """Raise ValueError unless the bytes are UTF-8; others get to run meanwhile."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(text), _PIECE):
        decoder.decode(text[at : at + _PIECE])
    decoder.decode(b"", True)


def decode_records(message: bytes, reader: RecordReader, *, named: bool) -> list[Record]:
    """Take a message of records, ``named`` ones of requests, apart; or raise MalformedMessage."""
    try:
        _, count = _FRAME.unpack_from(message)
        records, at = reader.read(message, _FRAME.size, count, named)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"message of calls: {error}") from error
    if at != len(message):
        raise MalformedMessage(f"message of calls: {len(message) - at} bytes after its end")
    return records
