"""The methods by which clients register their memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from gpubridge.config.schema import ProtoMessage
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.errors import BridgeError
from gpubridge.frontend.repository_control import ControlTasks
from gpubridge.protocol.grpc.messages import message_class, parse_message

Deferred = Callable[[bytes, Callable[[bytes | BridgeError], None]], None]
"""A method that answers later: gets the message, and what takes the answer."""


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

    def cuda_status(message: ProtoMessage, answer: ProtoMessage) -> None:
        for region in regions.status(message.name, on_device=True):
            there = answer.regions[region.name]
            there.name = region.name
            there.device_id = region.device_id
            there.byte_size = region.nbytes

    return {
        "SystemSharedMemoryRegister": _call("SystemSharedMemoryRegister", register),
        "SystemSharedMemoryUnregister": _call("SystemSharedMemoryUnregister", unregister),
        "SystemSharedMemoryStatus": _call("SystemSharedMemoryStatus", status, answers=True),
        "CudaSharedMemoryStatus": _call("CudaSharedMemoryStatus", cuda_status, answers=True),
    }


def cuda_calls(regions: ClientRegions, tasks: ControlTasks) -> dict[str, Deferred]:
    """Return the methods by which clients register CUDA memory, or no more: they answer later."""

    def register(message: ProtoMessage) -> Coroutine[Any, Any, None]:
        return regions.register_device(
            message.name, message.raw_handle, message.device_id, message.byte_size
        )

    def unregister(message: ProtoMessage) -> Coroutine[Any, Any, None]:
        return regions.unregister_device(message.name)

    return {
        "CudaSharedMemoryRegister": _later("CudaSharedMemoryRegister", register, tasks),
        "CudaSharedMemoryUnregister": _later("CudaSharedMemoryUnregister", unregister, tasks),
    }


def _later(
    method: str,
    work: Callable[[ProtoMessage], Coroutine[Any, Any, None]],
    tasks: ControlTasks,
) -> Deferred:
    def begin(data: bytes, answer: Callable[[bytes | BridgeError], None]) -> None:
        message = parse_message(f"{method}Request", data)
        encoded = message_class(f"{method}Response")().SerializeToString()
        tasks.start(work(message), lambda error: answer(error or encoded))

    return begin


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
