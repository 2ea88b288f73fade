"""A segment: device memory that processes share, and this process's pointer to it.

The server owns segments and exports each one once; stubs open each one once and find tensors in it by
their offset. So nothing is exported or opened for a request, and a stub that dies takes no memory with
it that others use. It crosses by a legacy handle or by a file descriptor; nothing else depends on which.
"""

from __future__ import annotations

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.legacy_handles import LegacyMemory
from gpubridge.cuda_ipc.memory_fds import FdMemory

__all__ = ["DeviceSegment"]


class DeviceSegment:
    """Device memory, made (`allocate`, `private`) or opened (`open`, `open_fd`); `close` lets it go.

    Attributes
    ----------
    region : int
        The region id by which every process knows this memory.
    size : int
        Bytes; what was asked for, rounded up to whole blocks of the driver (2 MiB).
    pointer : int
        Where it lies in this process's device addresses.
    uuid : str
        The device of the context that it was made or opened with.
    handle : bytes
        64 bytes, for `open` in another process; empty where it crosses otherwise.
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

        Parameters
        ----------
        by_fd : bool
            Whether they do that by a file descriptor, and not by a handle.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left; INTERNAL when it cannot be shared.
        """
        kind = FdMemory if by_fd else LegacyMemory
        return cls(context, region, kind.allocate(context, size))

    @classmethod
    def private(cls, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) for this process alone.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left.
        """
        return cls(context, region, LegacyMemory.allocate(context, size, shared=False))

    @classmethod
    def open(cls, context: DeviceContext, region: int, handle: bytes, size: int) -> DeviceSegment:
        """Open memory that another process owns.

        Takes up to milliseconds, so never for a request.

        Parameters
        ----------
        handle : bytes
            64 bytes, as the owner's driver gave them.
        size : int
            Bytes that will be used, from the start of the allocation.

        Raises
        ------
        BridgeError
            INVALID_ARG when the handle is none, or its memory has not so many bytes.
        CudaError
            The driver does not open it: it is this process's own, another device's, gone.
        """
        return cls(context, region, LegacyMemory.open(context, handle, size))

    @classmethod
    def open_fd(cls, context: DeviceContext, region: int, fd: int, size: int) -> DeviceSegment:
        """Open memory that another process has made, by a descriptor, which stays the caller's.

        Takes up to milliseconds, so never for a request.

        Parameters
        ----------
        size : int
            All its bytes, as its maker's segment has it.

        Raises
        ------
        CudaError
            The driver does not open it: it is no such descriptor, or another device's memory.
        """
        return cls(context, region, FdMemory.open(context, fd, size))

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor for `open_fd` in other processes, if there is one; closed with the segment."""
        fd = self._memory.fd
        return () if fd is None else (fd,)

    def let_reach(self, peer: DeviceContext) -> None:
        """Let another device copy to and from here, peer access being enabled.

        Raises
        ------
        CudaError
            That one does not reach this memory.
        """
        self._memory.let_reach(peer)

    def close(self) -> None:
        """Free or close the memory, which nobody may look at any more; idempotent.

        Waits for all work of the device in this process.

        Raises
        ------
        CudaError
            The context is lost; the memory goes with the process.
        """
        self._memory.close()
