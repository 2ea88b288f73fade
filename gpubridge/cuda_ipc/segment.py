"""A segment: device memory that processes share, and this process's pointer to it.

The server owns segments and exports each one once; stubs open each one once and find tensors in it by
their offset. So nothing is exported or opened for a request, and a stub that dies takes no memory with
it that others use. It crosses by a legacy handle or by a file descriptor; nothing else depends on which.
"""

from __future__ import annotations

import os
from typing import Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import (
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    CudaError,
    call,
    handle_bytes,
    handle_from,
    load,
)
from gpubridge.errors import BridgeError, invalid

# The driver cuts smaller allocations from shared blocks of this size, which a handle would lay open.
_GRANULARITY = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1

# Whatever the arenas of models cross by: a client's raw handle is such a one.
_NEEDS_LEGACY = (
    "; clients' CUDA shared memory needs legacy handles: use system shared memory here, or send "
    "tensors with the request"
)


class LegacyMemory:
    """An allocation, this process's own or another one's (`gpubridge.cuda_ipc.segment`).

    - ``pointer``, ``size``: where it lies in this process's device addresses; bytes.
    - ``handle``: 64 bytes, for `open` in another process; none of what is this process's alone.
    - ``fd``: there is none.
    """

    __slots__ = ("_context", "_owned", "fd", "handle", "pointer", "size")

    def __init__(
        self, context: DeviceContext, pointer: int, size: int, handle: bytes, *, owned: bool
    ) -> None:
        self._context: DeviceContext | None = context
        self._owned = owned
        self.pointer = pointer
        self.size = size
        self.handle = handle
        self.fd: int | None = None

    @classmethod
    def allocate(cls, context: DeviceContext, size: int, *, shared: bool = True) -> LegacyMemory:
        """Allocate at least ``size`` bytes; raises CudaError, and leaves nothing then."""
        size = -(-max(size, 1) // _GRANULARITY) * _GRANULARITY
        handle = b""
        with context.pushed():
            pointer = int(call("cuMemAlloc", size))
            if shared:
                try:
                    handle = handle_bytes(call("cuIpcGetMemHandle", pointer))
                except CudaError:
                    call("cuMemFree", pointer)
                    raise
        return cls(context, pointer, size, handle, owned=True)

    @classmethod
    def open(cls, context: DeviceContext, handle: bytes, size: int) -> LegacyMemory:
        """Open what another process owns; raises as `open_handle`."""
        return cls(context, open_handle(context, handle, size), size, handle, owned=False)

    def let_reach(self, peer: DeviceContext) -> None:
        """Nothing to do: `enable_peer_access` opens all allocations of a device to another one."""

    def close(self) -> None:
        """Free or close it, after all work of the device in this process; idempotent."""
        context, self._context = self._context, None
        if context is not None:
            with context.pushed():
                call("cuMemFree" if self._owned else "cuIpcCloseMemHandle", self.pointer)


def open_handle(context: DeviceContext, handle: bytes, size: int) -> int:
    """Open an allocation, check that it has ``size`` bytes, and return its pointer.

    Raises BridgeError: INVALID_ARG when the handle is none, or its memory has not so many bytes; it
    is closed again.
    Raises CudaError: the driver does not open it.
    """
    if size <= 0:
        raise invalid(f"expected a size of at least one byte of device memory, got {size}")
    ipc = handle_from("CUipcMemHandle", handle)
    with context.pushed():
        pointer = int(call("cuIpcOpenMemHandle", ipc, _LAZY_ENABLE_PEER_ACCESS))
        try:
            base, nbytes = call("cuMemGetAddressRange", pointer)
            end = int(base) + int(nbytes)
            if pointer + size > end:
                raise invalid(
                    f"expected device memory of {size} bytes, got {end - pointer}; register no "
                    "more bytes than were allocated"
                )
        except BridgeError:
            call("cuIpcCloseMemHandle", pointer)
            raise
    return pointer


class FdMemory:
    """Physical memory of a device, mapped in this process (`gpubridge.cuda_ipc.segment`).

    - ``pointer``, ``size``: where it lies in this process's device addresses; bytes.
    - ``handle``: there is none.
    - ``fd``: the descriptor, this object's, for `open` in other processes; None in those.
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

        Raises CudaError: the descriptor is none of such memory, its device is not this one, or the
        driver does not map it; nothing is left behind.
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


class DeviceSegment:
    """Device memory, made (`allocate`, `private`) or opened (`open`, `open_fd`); `close` lets it go.

    - ``region``: the region id by which every process knows this memory.
    - ``size``: bytes; what was asked for, rounded up to whole blocks of the driver (2 MiB).
    - ``pointer``: where it lies in this process's device addresses.
    - ``uuid``: the device of the context that it was made or opened with.
    - ``handle``: 64 bytes, for `open` in another process; empty where it crosses otherwise.
    """

    __slots__ = ("_memory", "handle", "pointer", "region", "size", "uuid")

    def __init__(
        self, context: DeviceContext, region: int, memory: LegacyMemory | FdMemory
    ) -> None:
        self._memory = memory
        self.region = region
        self.pointer = memory.pointer
        self.size = memory.size
        self.handle = memory.handle
        self.uuid = context.device.uuid

    @classmethod
    def allocate(
        cls, context: DeviceContext, region: int, size: int, *, by_fd: bool = False
    ) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) that others may open.

        Takes milliseconds, so never for a request.

        ``by_fd``: whether they do that by a file descriptor, and not by a handle.

        Raises CudaError: UNAVAILABLE when the device has no memory left; INTERNAL when it cannot be
        shared.
        """
        kind = FdMemory if by_fd else LegacyMemory
        return cls(context, region, kind.allocate(context, size))

    @classmethod
    def private(cls, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) for this process alone.

        Raises CudaError: UNAVAILABLE when the device has no memory left.
        """
        return cls(context, region, LegacyMemory.allocate(context, size, shared=False))

    @classmethod
    def open(cls, context: DeviceContext, region: int, handle: bytes, size: int) -> DeviceSegment:
        """Open memory that another process owns.

        Takes up to milliseconds, so never for a request.

        - ``handle``: 64 bytes, as the owner's driver gave them.
        - ``size``: bytes that will be used, from the start of the allocation.

        Raises BridgeError: INVALID_ARG when the handle is none, or its memory has not so many
        bytes.
        Raises CudaError: the driver does not open it: it is this process's own, another device's,
        gone.
        """
        return cls(context, region, LegacyMemory.open(context, handle, size))

    @classmethod
    def open_fd(cls, context: DeviceContext, region: int, fd: int, size: int) -> DeviceSegment:
        """Open memory that another process has made, by a descriptor, which stays the caller's.

        Takes up to milliseconds, so never for a request.

        ``size``: all its bytes, as its maker's segment has it.

        Raises CudaError: the driver does not open it: it is no such descriptor, or another device's
        memory.
        """
        return cls(context, region, FdMemory.open(context, fd, size))

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor for `open_fd` in other processes, if there is one; closed with the segment."""
        fd = self._memory.fd
        return () if fd is None else (fd,)

    def let_reach(self, peer: DeviceContext) -> None:
        """Let another device copy to and from here, peer access being enabled.

        Raises CudaError: that one does not reach this memory.
        """
        self._memory.let_reach(peer)

    def close(self) -> None:
        """Free or close the memory, which nobody may look at any more; idempotent.

        Waits for all work of the device in this process.

        Raises CudaError: the context is lost; the memory goes with the process.
        """
        self._memory.close()


class ClientDeviceRegion:
    """A client's allocation, opened on the device it lies on; `close` closes it.

    - ``pointer``: where it begins, in this process's device addresses.
    - ``size``: bytes that may be used.
    - ``uuid``: the device it lies on.
    """

    __slots__ = ("_context", "pointer", "size", "uuid")

    def __init__(self, context: DeviceContext, pointer: int, size: int) -> None:
        self._context: DeviceContext | None = context
        self.pointer = pointer
        self.size = size
        self.uuid = context.device.uuid

    @classmethod
    def open(cls, context: DeviceContext, handle: bytes, size: int) -> ClientDeviceRegion:
        """Open what a client has registered.

        Takes up to milliseconds, so never for a request.

        - ``context``: of the device that the client says it lies on.
        - ``handle``: the client's 64 bytes.
        - ``size``: bytes that the client says it has.

        Raises BridgeError: INVALID_ARG when the handle is none, cannot be opened here, lies on
        another device, or has not so many bytes; nothing stays open.
        Raises CudaError: this process's own trouble: its context is lost, or it has no memory left.
        """
        try:
            pointer = open_handle(context, handle, size)
        except CudaError as error:
            if error.sticky or error.status == OUT_OF_MEMORY:
                raise
            reason = error.message + (_NEEDS_LEGACY if error.status == NOT_SUPPORTED else "")
            raise invalid(f"failed to open CUDA IPC handle: {reason}") from error
        opened = cls(context, pointer, size)
        try:
            opened._check_device(context)
        except BridgeError:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """Close it; no copy of it may be under way. Idempotent.

        Raises CudaError: the context is lost; it is closed with the process.
        """
        context, self._context = self._context, None
        if context is not None:
            with context.pushed():
                call("cuIpcCloseMemHandle", self.pointer)

    def _check_device(self, context: DeviceContext) -> None:
        # Where devices reach each other, the driver opens memory of any.
        with context.pushed():
            attribute = load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            ordinal = call("cuPointerGetAttribute", attribute, self.pointer)
        if ordinal != context.device.ordinal:
            raise invalid(
                f"expected memory on GPU {context.device.uuid} (device {context.device.ordinal} of "
                f"the server), got memory on device {ordinal}; register it with the device it "
                "was allocated on"
            )
