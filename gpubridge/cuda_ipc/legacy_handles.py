"""Memory that crosses processes by a legacy IPC handle: 64 bytes, of an allocation of ``cuMemAlloc``.

It is the owner's: what the owner frees is gone for whoever has it open.
"""

from __future__ import annotations

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CudaError, call, handle_bytes, handle_from
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["LegacyMemory", "open_handle"]

# The driver cuts smaller allocations from shared blocks of this size, which a handle would lay open.
_GRANULARITY = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1


class LegacyMemory:
    """An allocation, this process's own or another one's (`gpubridge.cuda_ipc.segment`).

    Attributes
    ----------
    pointer, size : int
        Where it lies in this process's device addresses; bytes.
    handle : bytes
        64 bytes, for `open` in another process; none of what is this process's alone.
    fd : None
        There is none.
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

    Raises
    ------
    BridgeError
        INVALID_ARG when the handle is none, or its memory has not so many bytes; it is closed again.
    CudaError
        The driver does not open it.
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
