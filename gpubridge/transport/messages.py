"""The messages between the server and a stub: their kinds, and the layout of those of the hot path.

The first byte of every message is its kind. Rare messages carry a JSON object after it. Those that
carry requests and responses are packed little-endian structures::

    EXECUTE   frame   u8 kind, u8 alone, 2 pad, u32 batches
              batch   u64 sequence, u32 requests, 4 pad, request records
    RESULTS   frame   u8 kind, 3 pad, u32 batches
              batch   u64 sequence, u64 started ns, u64 called ns, u64 ended ns, u64 bytes copied,
                      u32 responses, 4 pad, response records
    RESPONSES frame   u8 kind, 3 pad, u32 responses, u64 bytes copied, response records

:mod:`gpubridge.transport.records` says how a record lies in them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Union

from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import with_number_aside, without_long_texts
from gpubridge.transport.records import Record, RecordReader, json_object, with_contexts

Buffer = Union[memoryview, bytes]


class Kind:
    """The first byte of a message (0 is the channel's own)."""

    INITIALIZE = 1
    EXECUTE = 2
    REGION = 3
    DROP_REGION = 4
    TRIM = 5
    FINALIZE = 6
    CONFIGURE = 7
    DEVICE_REGION = 8
    DEVICE_ALONE = 9
    PIN = 11
    READY = 16
    FAILED = 17
    RESULTS = 18
    LOG = 19
    FINALIZED = 20
    RESPONSES = 21
    COMPLETED = 22
    REGION_CLOSED = 23
    NO_DEVICE = 24
    CONNECTED = 25


class Completes:
    """Stub that completes the model's configuration: field ``completion`` of INITIALIZE.

    HERE: the stub asks its model, and sends COMPLETED. ELSEWHERE: another stub of the model does.
    Either way, CONFIGURE then brings the settings of the complete configuration. Empty: nobody.
    """

    HERE = "here"
    ELSEWHERE = "elsewhere"
    NOWHERE = ""


FALLBACKS = (
    "native_module",
    "inputs_kept",
    "client_inputs_kept",
    "client_inputs_written",
    "shared_inputs_written",
    "device_absent",
    "device_not_shared",
    "device_memory_full",
    "device_events_not_shared",
    "device_events_in_use",
    "device_input_on_host",
    "device_inputs_in_turn",
    "host_memory_not_pinned",
)
"""Why a stub takes a slower way: there is no compiled module; its model gets copies of its inputs;
its process cannot use the GPU, not share memory there with others, get none there for what it
hands on, or not let their streams wait for
its own; more is under way to other stubs than there are events; an input is larger than the device arena; that has no room for the
inputs of two batches; copies to and from the GPU are not asynchronous."""


class ResponseFlag:
    """Bits of a response record.

    OPEN: the request is not over; its model sends further responses by itself. EMPTY: there is no
    response in this record. RESCHEDULED: the model wants to have the request again.
    """

    ERROR = 1
    CANCELLED = 2
    OPEN = 4
    EMPTY = 8
    RESCHEDULED = 16


class Batch(NamedTuple):
    """A batch of an EXECUTE message, and its records."""

    sequence: int
    records: list[Record]


_FRAME = struct.Struct("<BBxxI")
_BATCH = struct.Struct("<QI4x")
_RESULT = struct.Struct("<QQQQQI4x")
_RESPONSES = struct.Struct("<BxxxIQ")


LONGEST_CONTROL = 16 << 20
"""Bytes of the longest message of a rare kind, parsed on the server's event loop: four times the longest
configuration of a model, whose refusal is worded by who reads it."""

_LONGEST_TEXT = 1 << 18


def shortened(text: str) -> str:
    """Return a text as it fits into a message of a rare kind."""
    more = len(text) - _LONGEST_TEXT
    return text if more <= 0 else f"{text[:_LONGEST_TEXT]}... ({more} more characters)"


def control_message(kind: int, **fields: Any) -> bytes:
    """Make a message of a rare kind from its fields."""
    return bytes((kind,)) + json.dumps(fields, separators=(",", ":")).encode()


def decode_control(message: Buffer) -> dict[str, Any]:
    """Return the fields of a message of a rare kind; MalformedMessage when it is no JSON object."""
    return json_object(bytes(message[1:]), f"message of kind {message[0]}")


def encode_frame(kind: int, batches: Sequence[bytes], alone: bool = False) -> bytes:
    """Join batches to an EXECUTE or RESULTS message; ``alone`` ones come one after the other."""
    return b"".join((_FRAME.pack(kind, alone, len(batches)), *batches))


def results_message(count: int, results: bytes) -> bytes:
    """Return a RESULTS message of the encoded results of so many batches."""
    return _FRAME.pack(Kind.RESULTS, False, count) + results


def comes_alone(message: Buffer) -> bool:
    """Say whether the batch of an EXECUTE message is one of many that come one after the other."""
    return message[1] != 0


def encode_result_batch(
    sequence: int, times: tuple[int, int, int], copied: int, records: Sequence[bytes]
) -> bytes:
    """Join encoded responses to a batch of a RESULTS message.

    The times are when the stub took the batch up, called ``execute``, and had its return value.
    """
    return b"".join((_RESULT.pack(sequence, *times, copied, len(records)), *records))


def encode_responses(records: Sequence[bytes], copied: int) -> bytes:
    """Make a message of responses that models send by themselves."""
    return b"".join((_RESPONSES.pack(Kind.RESPONSES, len(records), copied), *records))


def decode_execute(message: Buffer, reader: RecordReader) -> list[Batch]:
    """Take an EXECUTE message apart; MalformedMessage when a length or a count does not fit."""
    message = bytes(message)
    try:
        _, _, count = _FRAME.unpack_from(message)
        at = _FRAME.size
        batches = []
        for _ in range(count):
            sequence, requests = _BATCH.unpack_from(message, at)
            records, at = reader.read(message, at + _BATCH.size, requests, True)
            batches.append(Batch(sequence, records))
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"EXECUTE message: {error}") from error
    return batches


_RESPONSE_TEXTS = ("parameters", "error")


def set_long_texts_aside(message: bytes, longest: int) -> tuple[bytes, list[dict[str, memoryview]]]:
    """Take the texts of more than ``longest`` bytes out of a RESULTS or RESPONSES message.

    Returns a message that means the same, or the same where it is malformed, and by the number that
    the context of a response has in ``set_aside``: its texts by their fields, views, not decoded.
    """
    texts: list[dict[str, memoryview]] = []

    def replace(context: memoryview) -> bytes:
        made, taken = without_long_texts(context, longest, _RESPONSE_TEXTS)
        texts.append(taken)
        return with_number_aside(made, len(texts) - 1)

    view = memoryview(message)
    try:
        if message[0] == Kind.RESPONSES:
            _, count, _ = _RESPONSES.unpack_from(view)
            records, at = with_contexts(view, _RESPONSES.size, count, longest, replace)
            parts = [view[: _RESPONSES.size], *records]
        else:
            _, _, batches = _FRAME.unpack_from(view)
            at = _FRAME.size
            parts = [view[:at]]
            for _ in range(batches):
                begin, at = at, at + _RESULT.size
                count = _RESULT.unpack_from(view, begin)[-1]
                records, at = with_contexts(view, at, count, longest, replace)
                parts += (view[begin : begin + _RESULT.size], *records)
    except (struct.error, ValueError):
        return message, []
    return b"".join((*parts, view[at:])), texts
