"""Decoding of a stub's record into the outcome of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpubridge.engine.ipc.long_messages import LongTexts
from gpubridge.engine.memory.placed_response import PlacedResponse, held_bytes
from gpubridge.errors import BridgeError, ErrorCode, LongError
from gpubridge.request import (
    NO_BYTES,
    InferRequest,
    InferResponse,
    MemoryRange,
    Outcome,
    Parameters,
)
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.device_events import is_arena
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record, json_object

_SERVER = 0
_NONE = LongTexts(None, b"", None)
Ref = tuple[int, int, int, int]


def decode_response(
    record: Record,
    borrowed: BorrowedMemory,
    request: InferRequest,
    lent: Callable[[Ref], MemoryRange],
    texts: Sequence[LongTexts],
) -> Outcome:
    """Decode a record into a response, whose buffers are views without a copy, or an error.

    - ``borrowed``: the stub's output memory. Outputs in the client's own memory have no bytes.
    - ``lent``: finds memory that was lent to the stub: an output may alias an input of its request.
    - ``texts``: long texts that were removed from the message.

    Raises MalformedMessage for an invalid record.
    """
    flags = record.word
    context: ResponseContext = record.context
    if flags & ResponseFlag.CANCELLED:
        return BridgeError("the request was cancelled", ErrorCode.CANCELLED)
    long = _NONE
    if context.set_aside is not None:
        if context.set_aside >= len(texts):
            raise MalformedMessage("a response refers to missing long texts")
        long = texts[context.set_aside]
    if flags & ResponseFlag.ERROR:
        return _error(context, long)
    _check(record, request, borrowed.arena)
    parameters = long.parameters
    if context.parameters:
        parameters = json_object(context.parameters, "response parameters")
    if context.passed_on:
        return _passed_on(record, borrowed, parameters, lent)
    buffers = borrowed.views(record.refs)
    return InferResponse(
        record.signature, record.shapes, buffers, parameters, borrowed, record.refs
    )


def _check(record: Record, request: InferRequest, arena: bool) -> None:
    """Raise `MalformedMessage` for an output of the wrong size, or on a device unasked."""
    tensors = zip(record.signature.tensors, record.shapes, record.refs, strict=True)
    for spec, shape, ref in tensors:
        nbytes = spec.nbytes(shape)
        if nbytes is not None and nbytes != ref[2]:
            client = request.client
            if client is not None and ref[2] == 0 and spec.name in client.outputs:
                continue
            raise MalformedMessage(
                f"output '{spec.name}' of {ref[2]} bytes, its shape needs {nbytes}"
            )
    if arena and not (request.context.device or request.context.device_outputs):
        for ref in record.refs:
            if is_arena(ref[0]):
                raise MalformedMessage("an output on a device that was not requested")


def _passed_on(
    record: Record,
    borrowed: BorrowedMemory,
    parameters: Parameters | None,
    lent: Callable[[Ref], MemoryRange],
) -> InferResponse:
    """Return a response with outputs that alias inputs of its request."""
    parts = []
    for ref in record.refs:
        if ref[3] == record.ticket and ref[0] >> 32 == _SERVER:
            parts.append(lent(ref))
        elif ref[2]:
            (view,) = borrowed.views([ref])
            parts.append(MemoryRange(borrowed.segment(ref[0]), ref[1], ref[2], view))
        else:
            parts.append(NO_BYTES)
    buffers = [held_bytes(part) for part in parts]
    return PlacedResponse(record.signature, record.shapes, buffers, parameters, parts=parts)


def failure_reason(record: Record) -> str:
    """Return the failure reason of an error record, as metrics label it."""
    return "CANCELED" if record.word & ResponseFlag.CANCELLED else "BACKEND"


def _error(context: ResponseContext, long: LongTexts) -> BridgeError:
    try:
        code = ErrorCode.INTERNAL if context.code is None else ErrorCode(context.code)
    except ValueError:
        code = ErrorCode.UNKNOWN
    if long.error is not None:
        return LongError([long.error], [long.error_body], code)
    return BridgeError(context.error, code)
