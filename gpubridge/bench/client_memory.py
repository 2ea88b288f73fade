"""A client's memory on a GPU: a region for an input, a region for an output."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import numpy as np

from gpubridge.cuda_ipc import CopyStream, DeviceContext, DeviceInfo, DeviceSegment

__all__ = ["ClientMemory"]

_POISON = 0xA5


class ClientMemory:
    """Two regions of one size on a device; a context manager.

    Parameters
    ----------
    device : DeviceInfo
        Of this process; its primary context is retained.
    nbytes : int
        Of each region.

    Raises
    ------
    CudaError
        UNAVAILABLE when the device has no memory left; INTERNAL when it cannot be shared.

    Attributes
    ----------
    context, stream : DeviceContext, CopyStream
        What this class copies with; others may, too.
    source, target : DeviceSegment
        For an input and an output; each with the handle that a server opens.
    """

    def __init__(self, device: DeviceInfo, nbytes: int) -> None:
        self.nbytes = nbytes
        with ExitStack() as stack:
            self.context = DeviceContext(device)
            stack.callback(self.context.close)
            self.stream = CopyStream(self.context)
            stack.callback(self.stream.close)
            self.source = DeviceSegment.allocate(self.context, 0, nbytes)
            stack.callback(self.source.close)
            self.target = DeviceSegment.allocate(self.context, 0, nbytes)
            stack.callback(self.target.close)
            self._owned = stack.pop_all()

    def __enter__(self) -> ClientMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owned.close()

    def prepare(self, nbytes: int) -> bytes:
        """Write random bytes into the source, poison into the target; return the former."""
        sent = np.random.default_rng().bytes(nbytes)
        self.stream.h2d(self.source.pointer, memoryview(sent), nbytes)
        self.stream.h2d(self.target.pointer, memoryview(bytes([_POISON]) * nbytes), nbytes)
        self.stream.wait()
        return sent

    def received(self, nbytes: int) -> bytes:
        """Return what is in the target."""
        data = bytearray(nbytes)
        self.stream.d2h(memoryview(data), self.target.pointer, nbytes)
        self.stream.wait()
        return bytes(data)
