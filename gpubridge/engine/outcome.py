"""What a stub's record says became of a request."""

from __future__ import annotations

from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import InferRequest, InferResponse, Outcome
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.device_regions import is_arena
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record

__all__ = ["failure_reason", "outcome_of"]


def outcome_of(record: Record, borrowed: BorrowedMemory, request: InferRequest) -> Outcome:
    """Return the response or the error that a record is; its buffers are views of borrowed memory.

    Those of outputs in the client's own memory have no bytes.

    Raises
    ------
    MalformedMessage
        When it is neither.
    """
    flags = record.word
    extras = record.extras
    if flags & ResponseFlag.CANCELLED:
        return BridgeError("the request was cancelled", ErrorCode.CANCELLED)
    if flags & ResponseFlag.ERROR:
        return _error(extras or {})
    for spec, ref in zip(record.signature.tensors, record.refs, strict=True):
        if spec.nbytes is not None and spec.nbytes != ref[2]:
            client = request.client
            if client is not None and ref[2] == 0 and spec.name in client.outputs:
                continue
            raise MalformedMessage(
                f"output '{spec.name}' of {ref[2]} bytes, its shape needs {spec.nbytes}"
            )
    if borrowed.arena and b'"device_outputs"' not in request.extras:
        for ref in record.refs:
            if is_arena(ref[0]):
                raise MalformedMessage("an output on a device, which nobody has asked for")
    parameters = extras.get("parameters") if extras else None
    if parameters is not None and not isinstance(parameters, dict):
        raise MalformedMessage(f"response parameters: expected an object, got {parameters!r:.100}")
    buffers = borrowed.views(record.refs)
    return InferResponse(record.signature, buffers, parameters, borrowed, record.refs)


def failure_reason(record: Record) -> str:
    """Return why a request failed, in the words of the metrics; its record is no response."""
    return "CANCELED" if record.word & ResponseFlag.CANCELLED else "BACKEND"


def _error(extras: dict[str, Any]) -> BridgeError:
    try:
        code = ErrorCode(extras.get("code", ErrorCode.INTERNAL))
    except ValueError:
        code = ErrorCode.UNKNOWN
    return BridgeError(str(extras.get("error", "")), code)
