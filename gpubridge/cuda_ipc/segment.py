"""A segment: one allocation of device memory, its handle, and this process's pointer to it.

The server owns segments and exports each one once; stubs open each one once and find tensors in it by
their offset. So no handle is made or opened for a request, and a stub that dies takes no memory with
it that others use.
"""

from __future__ import annotations

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CudaError, call, handle_bytes, handle_from
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["DeviceSegment", "open_handle"]

# The driver cuts smaller allocations from shared blocks of this size, which a handle would lay open.
_GRANULARITY = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1


class DeviceSegment:
    """Device memory, owned (`allocate`) or opened (`open`); `close` frees or closes it.

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
        64 bytes, for `open` in another process.
    """

    __slots__ = ("_context", "_owned", "handle", "pointer", "region", "size", "uuid")

    def __init__(
        self,
        context: DeviceContext,
        region: int,
        pointer: int,
        size: int,
        handle: bytes,
        *,
        owned: bool,
    ) -> None:
        self._context: DeviceContext | None = context
        self._owned = owned
        self.region = region
        self.pointer = pointer
        self.size = size
        self.handle = handle
        self.uuid = context.device.uuid

    @classmethod
    def allocate(cls, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) that others may open.

        Takes milliseconds, so never for a request.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left; INTERNAL when it cannot be shared.
        """
        size = -(-max(size, 1) // _GRANULARITY) * _GRANULARITY
        with context.pushed():
            pointer = int(call("cuMemAlloc", size))
            try:
                handle = handle_bytes(call("cuIpcGetMemHandle", pointer))
            except CudaError:
                call("cuMemFree", pointer)
                raise
        return cls(context, region, pointer, size, handle, owned=True)

    @classmethod
    def private(cls, context: DeviceContext, region: int, size: int) -> DeviceSegment:
        """Allocate at least ``size`` bytes (contents undefined) for this process alone.

        Raises
        ------
        CudaError
            UNAVAILABLE when the device has no memory left.
        """
        size = -(-max(size, 1) // _GRANULARITY) * _GRANULARITY
        with context.pushed():
            pointer = int(call("cuMemAlloc", size))
        return cls(context, region, pointer, size, b"", owned=True)

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
        pointer = open_handle(context, handle, size)
        return cls(context, region, pointer, size, handle, owned=False)

    def close(self) -> None:
        """Free or close the memory, which nobody may look at any more; idempotent.

        Waits for all work of the device in this process.

        Raises
        ------
        CudaError
            The context is lost; the memory goes with the process.
        """
        context, self._context = self._context, None
        if context is not None:
            with context.pushed():
                call("cuMemFree" if self._owned else "cuIpcCloseMemHandle", self.pointer)


def open_handle(context: DeviceContext, handle: bytes, size: int) -> int:
    """Open an allocation, check that it has ``size`` bytes, and return its pointer.

    Raises
    ------
    BridgeError, CudaError
        As `DeviceSegment.open`; it is closed again then.
    """
    if size <= 0:
        raise BridgeError(
            f"expected a size of at least one byte of device memory, got {size}",
            ErrorCode.INVALID_ARG,
        )
    ipc = handle_from("CUipcMemHandle", handle)
    with context.pushed():
        pointer = int(call("cuIpcOpenMemHandle", ipc, _LAZY_ENABLE_PEER_ACCESS))
        try:
            base, nbytes = call("cuMemGetAddressRange", pointer)
            end = int(base) + int(nbytes)
            if pointer + size > end:
                raise BridgeError(
                    f"expected device memory of {size} bytes, got {end - pointer}; register no "
                    "more bytes than were allocated",
                    ErrorCode.INVALID_ARG,
                )
        except BridgeError:
            call("cuIpcCloseMemHandle", pointer)
            raise
    return pointer
