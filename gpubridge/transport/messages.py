"""Messages between the server and a stub: their kinds, and the binary layout of frequent ones.

The first byte of every message is its kind. Rare messages carry a JSON object after it. Those that
carry requests and responses are packed little-endian structures::

    EXECUTE   frame   u8 kind, u8 alone, 2 pad, u32 batches
              batch   u64 sequence, u32 requests, 4 pad, request records
    RESULTS   frame   u8 kind, 3 pad, u32 batches
              batch   u64 sequence, u64 started ns, u64 called ns, u64 ended ns, u64 bytes copied,
                      u32 responses, 4 pad, response records
    RESPONSES frame   u8 kind, 3 pad, u32 responses, u64 bytes copied, response records

:mod:`gpubridge.transport.records` has the layout of records.
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
    """First byte of a message (0 is reserved for the channel itself)."""

    INITIALIZE = 1
    EXECUTE = 2
    REGION = 3
    DROP_REGION = 4
    TRIM = 5
    FINALIZE = 6
    CONFIGURE = 7
    DEVICE_REGION = 8
    DEVICE_ALONE = 9
    CANCEL = 10
    PIN = 11
    READY = 16
    FAILED = 17
    RESULTS = 18
    NOTICE = 19
    FINALIZED = 20
    RESPONSES = 21
    COMPLETED = 22
    REGION_CLOSED = 23
    NO_DEVICE = 24
    CONNECTED = 25
    SPAN = 26


class Completes:
    """Which stub completes the model's configuration: `StubSettings.completion`.

    HERE: this stub calls its model and sends COMPLETED. ELSEWHERE: another stub of the model does. In
    both cases CONFIGURE follows with the complete settings. NOWHERE: the configuration is complete.
    """

    HERE = "here"
    ELSEWHERE = "elsewhere"
    NOWHERE = ""


FALLBACKS = {
    "native_module": "the stub runs without the compiled module",
    "inputs_kept": "a model that keeps very many inputs gets copies of them",
    "client_inputs_kept": "a model that keeps inputs in clients' shared memory gets copies",
    "client_inputs_written": "a model that writes to inputs in clients' shared memory gets copies",
    "shared_inputs_written": "a model that writes to inputs shared with other models gets copies",
    "device_absent": "the stub cannot use its GPU: its tensors stay in host memory",
    "device_not_shared": "processes cannot share memory of the GPU: tensors leave it between models",
    "device_memory_full": "the GPU, or the stub's memory there, is full: tensors leave the GPU",
    "device_events_not_shared": "other processes cannot wait for the stub's GPU work: the stub waits",
    "device_events_in_use": "more tensors are in flight than there are events: the stub waits",
    "device_input_on_host": "an input is larger than the stub's memory on the GPU",
    "device_inputs_in_turn": "inputs of two batches do not fit: none is copied ahead of its batch",
    "host_memory_not_pinned": "copies between host memory and the GPU are not asynchronous",
}
"""Reasons for which a stub takes a slower path, as the metric of fallbacks has them."""


class ResponseFlag:
    """Bits of a response record.

    OPEN: the request is still open, and its response sender sends further responses. EMPTY: the record
    has no response. RESCHEDULED: the model wants to get the request again.
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
"""Bytes of the longest message in JSON, which the server parses on its event loop: four times the
longest configuration of a model, so that the parser of configurations refuses longer ones."""

_LONGEST_TEXT = 1 << 18
MOST_ATTRIBUTES = 128
LONGEST_SPAN_TEXT = 4096
"""Characters of a text in a SPAN message, which has at most so many attributes."""


def shortened(text: str) -> str:
    """Return a text, shortened to the limit of a line of the log."""
    more = len(text) - _LONGEST_TEXT
    return text if more <= 0 else f"{text[:_LONGEST_TEXT]}... ({more} more characters)"


def control_message(kind: int, **fields: Any) -> bytes:
    """Encode a message with fields in JSON."""
    return bytes((kind,)) + json.dumps(fields, separators=(",", ":")).encode()


def decode_control(message: Buffer) -> dict[str, Any]:
    """Decode the fields of a message in JSON; may raise MalformedMessage."""
    return json_object(bytes(message[1:]), f"message of kind {message[0]}")


def encode_frame(kind: int, batches: Sequence[bytes], alone: bool = False) -> bytes:
    """Join batches to an EXECUTE or RESULTS message; ``alone``: see `comes_alone`."""
    return b"".join((_FRAME.pack(kind, alone, len(batches)), *batches))


def results_message(count: int, results: bytes) -> bytes:
    """Return a RESULTS message of the encoded results of ``count`` batches."""
    return _FRAME.pack(Kind.RESULTS, False, count) + results


def comes_alone(message: Buffer) -> bool:
    """Return whether an EXECUTE message is the only one in flight, as with a single client."""
    return message[1] != 0


def encode_result_batch(
    sequence: int, times: tuple[int, int, int], copied: int, records: Sequence[bytes]
) -> bytes:
    """Join encoded responses to a batch of a RESULTS message.

    ``times``: when the stub began the batch, called ``execute``, and got its return value.
    """
    return b"".join((_RESULT.pack(sequence, *times, copied, len(records)), *records))


def encode_responses(records: Sequence[bytes], copied: int) -> bytes:
    """Encode a message of responses that response senders send."""
    return b"".join((_RESPONSES.pack(Kind.RESPONSES, len(records), copied), *records))


def decode_execute(message: Buffer, reader: RecordReader) -> list[Batch]:
    """Decode an EXECUTE message; MalformedMessage if a length or count does not fit."""
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
    """Remove the texts of more than ``longest`` bytes from a RESULTS or RESPONSES message.

    Returns an otherwise equal message, or the same if it is malformed, and a list of removed texts,
    undecoded views by field; ``set_aside`` in a response's context is the index in that list.
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
