"""A segment: device memory that processes share, and this process's pointer to it.

The server owns segments and exports each one once; stubs open each one once and find tensors in it by
their offset. So nothing is exported or opened for a request, and memory that others use outlives a stub.
A segment is shared by a legacy handle or by a file descriptor; no other code depends on which.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import Any, Callable

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import (
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    CudaError,
    call,
    handle_bytes,
    handle_from,
    load,
    status_of,
)
from gpubridge.errors import BridgeError, invalid

# The driver places smaller allocations in shared blocks of this size, which a handle would expose.
_GRANULARITY = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1

# What the driver says of an address at which nothing is mapped.
_UNMAPPED = (1, 500)

# A client's raw handle is a legacy one, however the arenas of models are shared.
_NEEDS_LEGACY = (
    "; clients' CUDA shared memory needs legacy handles: use system shared memory here, or send "
    "tensors with the request"
)


class DeviceSegment:
    """Device memory, allocated (`allocate`, `private`) or opened (`open`, `open_fd`) until `close`.

    These calls take milliseconds, so none is made for a request.

    - ``region``: the region id, the same in every process.
    - ``size``: bytes, rounded up to whole blocks of the driver (2 MiB).
    - ``pointer``: its device address in this process.
    - ``uuid``: the device of the context that it was allocated or opened with.
    - ``handle``: 64 bytes, for `open` in another process; empty if it is not shared by a handle.
    - ``fds``: the descriptor for `open_fd` in other processes, if there is one; owned by the segment.
    """

    __slots__ = ("_context", "_free", "fds", "handle", "pointer", "region", "size", "uuid")

    def __init__(  # noqa: PLR0913  (the fields of a segment)
        self,
        context: DeviceContext,
        region: int,
        pointer: int,
        size: int,
        free: Callable[[int, int], None],
        *,
        handle: bytes = b"",
        fds: tuple[int, ...] = (),
    ) -> None:
        self._context: DeviceContext | None = context
        self._free = free
        self.region = region
        self.pointer = pointer
        self.size = size
        self.handle = handle
        self.fds = fds
        self.uuid = context.device.uuid

    @classmethod
    def allocate(
        cls, context: DeviceContext, region: int, size: int, *, by_fd: bool = False
    ) -> DeviceSegment:
        """Allocate at least ``size`` bytes (undefined) that others open by a handle, or ``by_fd``.

        Raises CudaError: UNAVAILABLE without device memory; INTERNAL if it cannot be shared.
        """
        if by_fd:
            fd, pointer, size = _allocate_physical(context, size)
            return cls(context, region, pointer, size, _unmap, fds=(fd,))
        segment = cls.private(context, region, size)
        try:
            with context.pushed():
                segment.handle = handle_bytes(call("cuIpcGetMemHandle", segment.pointer))
        except CudaError:
            segment.close()
            raise
        return segment

    @classmethod
    def private(cls, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) for this process alone."""
        size = -(-max(size, 1) // _GRANULARITY) * _GRANULARITY
        with context.pushed():
            return cls(context, region, int(call("cuMemAlloc", size)), size, _free_allocation)

    @classmethod
    def open(cls, context: DeviceContext, region: int, handle: bytes, size: int) -> DeviceSegment:
        """Open memory that another process owns, and use ``size`` bytes from its start.

        Raises BridgeError: INVALID_ARG for a malformed handle, or one of fewer bytes; CudaError if the
        memory is this process's own, another device's, or freed.
        """
        pointer = _open_handle(context, handle, size)
        return cls(context, region, pointer, size, _close_handle, handle=handle)

    @classmethod
    def open_fd(cls, context: DeviceContext, region: int, fd: int, size: int) -> DeviceSegment:
        """Map all ``size`` bytes that another process has allocated; the caller keeps ``fd``.

        Raises CudaError for a wrong descriptor, or another device's memory, without leaking any.
        """
        with context.pushed():
            memory = call("cuMemImportFromShareableHandle", fd, _kind())
            try:
                pointer = _map(memory, size, context.device.ordinal)
            finally:
                call("cuMemRelease", memory)
        return cls(context, region, pointer, size, _unmap)

    def allow_peer(self, peer: DeviceContext) -> None:
        """Let another device, with peer access, copy to and from here; or raise CudaError."""
        # All other allocations of a device are covered by `enable_peer_access`.
        if self._free is _unmap:
            _allow(self.pointer, self.size, peer.device.ordinal)

    def close(self) -> None:
        """Free or close the memory, which must not be in use any more; idempotent.

        Waits for all work of the device in this process. After a CudaError, it is freed with the
        process.
        """
        fds, self.fds = self.fds, ()
        for fd in fds:
            # Descriptors sent to other processes are duplicates.
            os.close(fd)
        context, self._context = self._context, None
        if context is not None:
            with context.pushed():
                self._free(self.pointer, self.size)


def open_client_region(context: DeviceContext, handle: bytes, size: int) -> DeviceSegment:
    """Open an allocation that a client has registered, on the device that the client names.

    Raises BridgeError: INVALID_ARG for any fault of the client, after which nothing stays open;
    CudaError if this process's context is lost, or out of memory.
    """
    try:
        opened = DeviceSegment.open(context, 0, handle, size)
    except CudaError as error:
        if error.sticky or error.status == OUT_OF_MEMORY:
            raise
        reason = error.message + (_NEEDS_LEGACY if error.status == NOT_SUPPORTED else "")
        raise invalid(f"failed to open CUDA IPC handle: {reason}") from error
    try:
        _check_device(context, opened.pointer)
    except BridgeError:
        opened.close()
        raise
    return opened


def _check_device(context: DeviceContext, pointer: int) -> None:
    # With peer access, the driver opens memory of any device.
    with context.pushed():
        attribute = load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        ordinal = call("cuPointerGetAttribute", attribute, pointer)
    if ordinal != context.device.ordinal:
        raise invalid(
            f"expected memory on GPU {context.device.uuid} (device {context.device.ordinal} of "
            f"the server), got memory on device {ordinal}; register it with the device it "
            "was allocated on"
        )


def _free_allocation(pointer: int, _: int) -> None:
    call("cuMemFree", pointer)


def _close_handle(pointer: int, _: int) -> None:
    _opened.close(pointer)


def _unmap(pointer: int, size: int) -> None:
    # Freeing waits by itself; unmapping would take the memory from running work.
    call("cuCtxSynchronize")
    call("cuMemUnmap", pointer, size)
    call("cuMemAddressFree", pointer, size)


def _open_handle(context: DeviceContext, handle: bytes, size: int) -> int:
    """Open an allocation, check that it has ``size`` bytes, and return its pointer."""
    if size <= 0:
        raise invalid(f"expected a size of at least one byte of device memory, got {size}")
    ipc = handle_from("CUipcMemHandle", handle)
    with context.pushed():
        pointer = _opened.open(ipc)
        try:
            base, nbytes = call("cuMemGetAddressRange", pointer)
            end = int(base) + int(nbytes)
            if pointer + size > end:
                raise invalid(
                    f"expected device memory of {size} bytes, got {end - pointer}; register no "
                    "more bytes than were allocated"
                )
        except BridgeError:
            _opened.close(pointer)
            raise
    return pointer


class _OpenedHandles:
    """Memory of other processes that this one has opened by handles.

    Small allocations of a process share a block of 2 MiB, and a handle opens all of the block. Drivers
    that do not count the openings unmap the block at the first closing. So what is closed stays open
    while anything in the same block is in use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By block: the number of openings in use, and the pointers of the unused ones.
        self._used: defaultdict[int, int] = defaultdict(int)
        self._unused: defaultdict[int, list[int]] = defaultdict(list)

    def open(self, handle: Any) -> int:
        """Open an allocation; return its pointer."""
        with self._lock:
            pointer = int(call("cuIpcOpenMemHandle", handle, _LAZY_ENABLE_PEER_ACCESS))
            self._used[pointer // _GRANULARITY] += 1
            return pointer

    def close(self, pointer: int) -> None:
        """Close an opening, and those whose closing was put off for it."""
        block = pointer // _GRANULARITY
        with self._lock:
            self._used[block] -= 1
            self._unused[block].append(pointer)
            if self._used[block]:
                return
            del self._used[block]
            first, *others = self._unused.pop(block)
            call("cuIpcCloseMemHandle", first)
            for other in others:
                if not status_of("cuMemGetAddressRange", other, expected=_UNMAPPED):
                    call("cuIpcCloseMemHandle", other)


_opened = _OpenedHandles()


def _allocate_physical(context: DeviceContext, size: int) -> tuple[int, int, int]:
    """Allocate physical memory and map it; return its descriptor, its pointer and its size."""
    properties = _properties(context.device.ordinal)
    smallest = load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with context.pushed():
        unit = int(call("cuMemGetAllocationGranularity", properties, smallest))
        size = -(-max(size, 1) // unit) * unit
        memory = call("cuMemCreate", size, properties, 0)
        try:
            fd = int(call("cuMemExportToShareableHandle", memory, _kind(), 0))
            try:
                # Processes that a stub's model starts must not keep the memory.
                os.set_inheritable(fd, False)
                return fd, _map(memory, size, context.device.ordinal), size
            except BaseException:
                os.close(fd)
                raise
        finally:
            # Mappings and descriptors keep the memory.
            call("cuMemRelease", memory)


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
    """Map physical memory at new addresses, for one device."""
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
