"""The methods by which clients register their memory."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.config.schema import ProtoMessage
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.shared_memory import CUDA_REFUSAL
from gpubridge.protocol.grpc.messages import message_class, parse_message

__all__ = ["memory_calls"]


def memory_calls(regions: ClientRegions) -> dict[str, Callable[[bytes], bytes]]:
    """Return the methods by their names: what each answers to a message."""

    def register(message: ProtoMessage) -> None:
        regions.register(message.name, message.key, message.offset, message.byte_size)

    def unregister(message: ProtoMessage) -> None:
        if message.name:
            regions.unregister(message.name)
        else:
            regions.unregister_all()

    def status(message: ProtoMessage, answer: ProtoMessage) -> None:
        for region in regions.status(message.name):
            there = answer.regions[region.name]
            there.name = region.name
            there.key = region.key
            there.offset = region.offset
            there.byte_size = region.nbytes

    return {
        "SystemSharedMemoryRegister": _call("SystemSharedMemoryRegister", register),
        "SystemSharedMemoryUnregister": _call("SystemSharedMemoryUnregister", unregister),
        "SystemSharedMemoryStatus": _call("SystemSharedMemoryStatus", status, answers=True),
        "CudaSharedMemoryRegister": _call("CudaSharedMemoryRegister", _register_cuda),
        "CudaSharedMemoryUnregister": _call("CudaSharedMemoryUnregister", lambda _: None),
        "CudaSharedMemoryStatus": _call("CudaSharedMemoryStatus", _cuda_status),
    }


def _call(
    method: str, work: Callable[..., None], *, answers: bool = False
) -> Callable[[bytes], bytes]:
    def call(data: bytes) -> bytes:
        message = parse_message(f"{method}Request", data)
        answer = message_class(f"{method}Response")()
        if answers:
            work(message, answer)
        else:
            work(message)
        encoded: bytes = answer.SerializeToString(deterministic=True)
        return encoded

    return call


def _register_cuda(message: ProtoMessage) -> None:
    raise BridgeError(f"cannot register '{message.name}': {CUDA_REFUSAL}", ErrorCode.UNSUPPORTED)


def _cuda_status(message: ProtoMessage) -> None:
    if message.name:
        raise BridgeError(
            f"Unable to find cuda shared memory region: '{message.name}'", ErrorCode.NOT_FOUND
        )
