"""The server's side of messages in Python: the compiled one has to agree, and stubs are tested with it."""

import struct
from typing import NamedTuple

from gpubridge.transport.channel import MalformedMessage

__all__ = ["ResultBatch", "decode_responses", "decode_results", "encode_batch"]

_FRAME = struct.Struct("<BBxxI")
_BATCH = struct.Struct("<QI4x")
_RESULT = struct.Struct("<QQQQQI4x")
_RESPONSES = struct.Struct("<BxxxIQ")


class ResultBatch(NamedTuple):
    sequence: int
    records: list
    started: int
    called: int
    ended: int
    copied: int


def encode_batch(sequence, records):
    """Join encoded requests to a batch of an EXECUTE message."""
    return b"".join((_BATCH.pack(sequence, len(records)), *records))


def decode_responses(message, reader):
    """Take a RESPONSES message apart; returns its records, and how many bytes were copied for them."""
    message = bytes(message)
    try:
        _, count, copied = _RESPONSES.unpack_from(message)
        records, at = reader.read(message, _RESPONSES.size, count, False)
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"RESPONSES message: {error}") from error
    if at != len(message):
        raise MalformedMessage(f"RESPONSES message: {len(message) - at} bytes after its end")
    return records, copied


def decode_results(message, reader):
    """Take a RESULTS message apart; returns its batches."""
    message = bytes(message)
    try:
        _, _, count = _FRAME.unpack_from(message)
        at = _FRAME.size
        batches = []
        for _ in range(count):
            sequence, started, called, ended, copied, responses = _RESULT.unpack_from(message, at)
            records, at = reader.read(message, at + _RESULT.size, responses, False)
            batches.append(ResultBatch(sequence, records, started, called, ended, copied))
    except (struct.error, ValueError) as error:
        raise MalformedMessage(f"RESULTS message: {error}") from error
    if at != len(message):
        raise MalformedMessage(f"RESULTS message: {len(message) - at} bytes after its end")
    return batches
