"""A device's primary context in this process, which frameworks use too, so that pointers are shared."""

from __future__ import annotations

import functools
import threading
from typing import Any

from gpubridge.cuda_ipc.devices import DeviceInfo
from gpubridge.cuda_ipc.driver import call, load, status_of
from gpubridge.errors import InternalError

_ALREADY_ENABLED = 704


class DeviceContext:
    """Retains the primary context of one device of this process; `close` releases it.

    Raises CudaError if the context cannot be created; UNAVAILABLE without enough device memory.
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
        """Make this device the target of the thread's driver calls from now on."""
        call("cuCtxSetCurrent", self.raw)

    def pushed(self) -> _Pushed:
        """Return a context manager in which the thread's driver calls go to this device.

        It restores the previous context, since a model may have chosen another device.
        """
        return _Pushed(self.raw)

    def close(self) -> None:
        """Release the context, after everything created in it; it exists while others retain it."""
        context, self._context = self._context, None
        if context is None:
            return
        # A released context must not stay current: later calls of this thread would fail.
        if call("cuCtxGetCurrent") == context:
            call("cuCtxSetCurrent", None)
        call("cuDevicePrimaryCtxRelease", self._device)


def enable_peer_access(context: DeviceContext, peer: DeviceContext) -> None:
    """Let copies between two devices bypass the host; or raise CudaError."""
    with context.pushed():
        status_of("cuCtxEnablePeerAccess", peer.raw, 0, expected=(_ALREADY_ENABLED,))


def relax_captures() -> None:
    """Keep the calls of this thread of the bridge from invalidating a graph that others capture."""
    if not _thread.relaxed:
        _relax()


class _Thread(threading.local):
    """State of a thread: whether its capture mode is relaxed, and the context that the bridge pushed."""

    relaxed = False
    context: Any = None


_thread = _Thread()


@functools.cache
def _relaxed() -> Any:
    return load().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def _relax() -> Any:
    before = call("cuThreadExchangeStreamCaptureMode", _relaxed())
    _thread.relaxed = True
    return before


class _Pushed:
    """Makes a context current, and the thread's capture mode relaxed, until exit.

    A model may capture a graph in another thread, or in this one when it allocates memory. In the
    default capture mode, the driver treats any query, allocation or wait as an error that invalidates
    the capture. The model's mode and context are restored on exit.
    """

    __slots__ = ("_context", "_mode", "_outer", "_pushed")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._pushed = False
        self._mode: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        thread = _thread
        if not thread.relaxed:
            self._mode = _relax()
        self._outer = thread.context
        if self._outer == self._context:
            return
        try:
            if call("cuCtxGetCurrent") != self._context:
                call("cuCtxPushCurrent", self._context)
                self._pushed = True
        except BaseException:
            self._restore_mode()
            raise
        thread.context = self._context

    def __exit__(self, *_: object) -> None:
        _thread.context = self._outer
        try:
            if self._pushed:
                self._pushed = False
                call("cuCtxPopCurrent")
        finally:
            self._restore_mode()

    def _restore_mode(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            _thread.relaxed = False
            call("cuThreadExchangeStreamCaptureMode", mode)
