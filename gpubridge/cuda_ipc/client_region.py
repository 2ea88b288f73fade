"""Clients' device memory: opened where a client's requests are run, never owned.

What a client frees is gone for everybody; the device then ends the context of whoever looks at it.
So each process that looks at it is one that may be started again.
"""

from __future__ import annotations

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import NOT_SUPPORTED, OUT_OF_MEMORY, CudaError, call, load
from gpubridge.cuda_ipc.legacy_handles import open_handle
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["ClientDeviceRegion"]

# Whatever the arenas of models cross by: a client's raw handle is such a one.
_NEEDS_LEGACY = (
    "; clients' CUDA shared memory needs legacy handles: use system shared memory here, or send "
    "tensors with the request"
)


class ClientDeviceRegion:
    """A client's allocation, opened on the device it lies on; `close` closes it.

    Attributes
    ----------
    pointer : int
        Where it begins, in this process's device addresses.
    size : int
        Bytes that may be used.
    uuid : str
        The device it lies on.
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

        Parameters
        ----------
        context : DeviceContext
            Of the device that the client says it lies on.
        handle : bytes
            The client's 64 bytes.
        size : int
            Bytes that the client says it has.

        Raises
        ------
        BridgeError
            INVALID_ARG when the handle is none, cannot be opened here, lies on another device, or
            has not so many bytes; nothing stays open.
        CudaError
            This process's own trouble: its context is lost, or it has no memory left.
        """
        try:
            pointer = open_handle(context, handle, size)
        except CudaError as error:
            if error.sticky or error.status == OUT_OF_MEMORY:
                raise
            reason = error.message + (_NEEDS_LEGACY if error.status == NOT_SUPPORTED else "")
            raise BridgeError(
                f"failed to open CUDA IPC handle: {reason}", ErrorCode.INVALID_ARG
            ) from error
        opened = cls(context, pointer, size)
        try:
            opened._check_device(context)
        except BridgeError:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        """Close it; no copy of it may be under way. Idempotent.

        Raises
        ------
        CudaError
            The context is lost; it is closed with the process.
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
            raise BridgeError(
                f"expected memory on GPU {context.device.uuid} (device {context.device.ordinal} of "
                f"the server), got memory on device {ordinal}; register it with the device it "
                "was allocated on",
                ErrorCode.INVALID_ARG,
            )
