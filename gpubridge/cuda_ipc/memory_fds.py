"""Memory that crosses processes by a file descriptor: physical memory, which each process maps itself.

For where legacy handles are refused. The memory lives as long as anybody has it mapped, or has a
descriptor of it; its maker may unmap it, or die.
"""

from __future__ import annotations

import os
from typing import Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import call, load

__all__ = ["FdMemory"]


class FdMemory:
    """Physical memory of a device, mapped in this process (`gpubridge.cuda_ipc.segment`).

    Attributes
    ----------
    pointer, size : int
        Where it lies in this process's device addresses; bytes.
    handle : bytes
        There is none.
    fd : int or None
        The descriptor, this object's, for `open` in other processes; None in those.
    """

    __slots__ = ("_context", "fd", "handle", "pointer", "size")

    def __init__(self, context: DeviceContext, pointer: int, size: int, fd: int | None) -> None:
        self._context: DeviceContext | None = context
        self.pointer = pointer
        self.size = size
        self.handle = b""
        self.fd = fd

    @classmethod
    def allocate(cls, context: DeviceContext, size: int) -> FdMemory:
        """Allocate at least ``size`` bytes; raises CudaError, and leaves nothing then."""
        properties = _properties(context.device.ordinal)
        smallest = load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with context.pushed():
            unit = int(call("cuMemGetAllocationGranularity", properties, smallest))
            size = -(-max(size, 1) // unit) * unit
            memory = call("cuMemCreate", size, properties, 0)
            try:
                fd = int(call("cuMemExportToShareableHandle", memory, _kind(), 0))
                try:
                    # What a stub's model starts shall not keep the memory.
                    os.set_inheritable(fd, False)
                    pointer = _map(memory, size, context.device.ordinal)
                except BaseException:
                    os.close(fd)
                    raise
            finally:
                # Mappings and descriptors keep it.
                call("cuMemRelease", memory)
        return cls(context, pointer, size, fd)

    @classmethod
    def open(cls, context: DeviceContext, fd: int, size: int) -> FdMemory:
        """Map what another process has made, of exactly ``size`` bytes; ``fd`` stays the caller's.

        Raises
        ------
        CudaError
            The descriptor is none of such memory, its device is not this one, or the driver does not
            map it; nothing is left behind.
        """
        with context.pushed():
            memory = call("cuMemImportFromShareableHandle", fd, _kind())
            try:
                pointer = _map(memory, size, context.device.ordinal)
            finally:
                call("cuMemRelease", memory)
        return cls(context, pointer, size, None)

    def let_reach(self, peer: DeviceContext) -> None:
        """Let another device read and write here, too; raises CudaError where it does not reach it."""
        _allow(self.pointer, self.size, peer.device.ordinal)

    def close(self) -> None:
        """Unmap it, after all work of the device in this process; idempotent."""
        fd, self.fd = self.fd, None
        if fd is not None:
            # Those on their way to other processes are descriptors of their own.
            os.close(fd)
        context, self._context = self._context, None
        if context is not None:
            with context.pushed():
                # Freeing waits by itself; unmapping takes the memory from what runs.
                call("cuCtxSynchronize")
                call("cuMemUnmap", self.pointer, self.size)
                call("cuMemAddressFree", self.pointer, self.size)


def _kind() -> Any:
    return load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(ordinal: int) -> Any:
    driver = load()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _kind()
    return properties


def _map(memory: Any, size: int, ordinal: int) -> int:
    """Map physical memory at addresses of its own, for one device."""
    pointer = int(call("cuMemAddressReserve", size, 0, 0, 0))
    try:
        call("cuMemMap", pointer, size, 0, memory, 0)
        try:
            _allow(pointer, size, ordinal)
        except BaseException:
            call("cuMemUnmap", pointer, size)
            raise
    except BaseException:
        call("cuMemAddressFree", pointer, size)
        raise
    return pointer


def _allow(pointer: int, size: int, ordinal: int) -> None:
    driver = load()
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call("cuMemSetAccess", pointer, size, [access], 1)
