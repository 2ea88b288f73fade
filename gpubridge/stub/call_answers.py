"""What comes of a model's call, as the model sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.pb_utils import InferenceResponse, Tensor, TritonError
from gpubridge.pb_utils.shared_tensor import SharedTensor
from gpubridge.stub.device.inputs import received_on_device
from gpubridge.stub.device.memory import StubDevice
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import Record
from gpubridge.transport.region_ids import is_read_only

__all__ = ["answer_of"]


def answer_of(
    record: Record,
    borrowed: BorrowedMemory,
    device: StubDevice | None,
    copy: Callable[[memoryview], memoryview],
) -> InferenceResponse:
    """Return the response or the error that a record is; its tensors are views of borrowed memory.

    ``copy`` makes a copy for the model of what others may look at, too.
    """
    context: ResponseContext = record.context
    if record.word & ResponseFlag.ERROR:
        error = TritonError(
            context.error, _code(ErrorCode.INTERNAL if context.code is None else context.code)
        )
        return InferenceResponse([], error)
    try:
        tensors = _tensors(record, borrowed, copy)
        if device is not None:
            tensors = received_on_device(device, tensors, record)
    except BridgeError as failure:
        return InferenceResponse([], TritonError(failure.message))
    return InferenceResponse._received(tensors, context.parameters or "{}")


def _tensors(
    record: Record, borrowed: BorrowedMemory, copy: Callable[[memoryview], memoryview]
) -> list[Any]:
    refs, specs, shapes = record.refs, record.signature.tensors, record.shapes
    if not any(is_read_only(ref[0]) for ref in refs):
        return borrowed.tensors(refs, specs, shapes, Tensor)
    tensors = borrowed.tensors(refs, specs, shapes, SharedTensor, True, True)
    for tensor in tensors:
        tensor._belongs_to(copy)
    return tensors


def _code(number: int) -> Any:
    try:
        return TritonError.__dict__[ErrorCode(number).name]
    except (ValueError, KeyError):
        return TritonError.UNKNOWN
