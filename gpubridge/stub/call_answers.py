"""What comes of a model's call, as the model sees it."""

from __future__ import annotations

import json
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Tensor, TritonError
from gpubridge.stub.device.inputs import received_on_device
from gpubridge.stub.device.memory import StubDevice
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record

__all__ = ["answer_of"]


def answer_of(
    record: Record, borrowed: BorrowedMemory, device: StubDevice | None
) -> InferenceResponse:
    """Return the response or the error that a record is; its tensors are views of borrowed memory."""
    extras = record.extras or {}
    if record.word & ResponseFlag.ERROR:
        error = TritonError(extras["error"], _code(extras["code"]))
        return InferenceResponse([], error)
    try:
        tensors = borrowed.tensors(record.refs, record.signature.tensors, record.shapes, Tensor)
        if device is not None:
            tensors = received_on_device(device, tensors, record)
    except BridgeError as failure:
        return InferenceResponse([], TritonError(failure.message))
    parameters = json.dumps(extras["parameters"]) if "parameters" in extras else "{}"
    return InferenceResponse._received(tensors, parameters)


def _code(number: int) -> Any:
    try:
        return TritonError.__dict__[ErrorCode(number).name]
    except (ValueError, KeyError):
        return TritonError.UNKNOWN
