"""A device's primary context in this process: what frameworks use too, so that pointers are shared."""

from __future__ import annotations

from typing import Any

from gpubridge.cuda_ipc.devices import DeviceInfo
from gpubridge.cuda_ipc.driver import call, status_of
from gpubridge.errors import InternalError

_ALREADY_ENABLED = 704


class DeviceContext:
    """Retains the primary context of one device of this process; `close` releases it.

    Raises CudaError: the context cannot be made; UNAVAILABLE for want of device memory.
    """

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._device = call("cuDeviceGet", device.ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._device)

    @property
    def raw(self) -> Any:
        """The driver's ``CUcontext``."""
        if self._context is None:
            raise InternalError(f"the context of {self.device.uuid} is closed")
        return self._context

    def make_current(self) -> None:
        """Let calls of this thread mean this device from now on."""
        call("cuCtxSetCurrent", self.raw)

    def pushed(self) -> _Pushed:
        """Return a context manager inside which calls of this thread mean this device.

        What was current before is current again afterwards: a model may have chosen another device.
        """
        return _Pushed(self.raw)

    def close(self) -> None:
        """Release the context, behind everything made in it; it lives on while others retain it."""
        context, self._context = self._context, None
        if context is None:
            return
        # A released context must not stay current: each later call of this thread would fail.
        if call("cuCtxGetCurrent") == context:
            call("cuCtxSetCurrent", None)
        call("cuDevicePrimaryCtxRelease", self._device)


def enable_peer_access(context: DeviceContext, peer: DeviceContext) -> None:
    """Let copies of one device reach another one's memory without the host; or raise CudaError."""
    with context.pushed():
        status_of("cuCtxEnablePeerAccess", peer.raw, 0, expected=(_ALREADY_ENABLED,))


class _Pushed:
    """Makes a context current for a while; does nothing where it is current."""

    __slots__ = ("_context", "_pushed")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        if call("cuCtxGetCurrent") != self._context:
            call("cuCtxPushCurrent", self._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._pushed = False
            call("cuCtxPopCurrent")
