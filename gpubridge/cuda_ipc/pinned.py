"""Host memory that the device reads and writes by itself: pinned whole, once, off the request path."""

from __future__ import annotations

import ctypes

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CudaError, call
from gpubridge.errors import InternalError

__all__ = ["PinnedMemory"]

# For the contexts of all devices.
_PORTABLE = 1


class PinnedMemory:
    """Pins mapped segments of this process, and knows which ones are pinned.

    Pinning takes about a second per GiB. Memory that cannot be pinned is copied all the same, slower
    and with the caller waiting.

    Parameters
    ----------
    context : DeviceContext
        Of any device; pinned memory is pinned for all.

    Attributes
    ----------
    nbytes : int
        Bytes pinned now.
    reason : str
        Why the last memory that could not be pinned was not; empty if there was none.
    """

    def __init__(self, context: DeviceContext) -> None:
        self.nbytes = 0
        self.reason = ""
        self._context = context
        self._pinned: dict[int, int] = {}

    def pin(self, memory: memoryview) -> bool:
        """Pin a whole segment; return whether it is pinned now (else see ``reason``).

        It has to be unpinned before it is unmapped.

        Raises
        ------
        CudaError
            Only a sticky one: the context is lost.
        """
        address = _address(memory)
        if address in self._pinned:
            if self._pinned[address] != memory.nbytes:
                raise InternalError(
                    f"{self._pinned[address]} bytes are pinned where {memory.nbytes} are asked for"
                )
            return True
        try:
            with self._context.pushed():
                call("cuMemHostRegister", address, memory.nbytes, _PORTABLE)
        except CudaError as error:
            if error.sticky:
                raise
            self.reason = error.message
            return False
        self._pinned[address] = memory.nbytes
        self.nbytes += memory.nbytes
        return True

    def unpin(self, memory: memoryview) -> None:
        """Unpin a segment, if it is pinned; no copy of it may be under way."""
        self._unpin(_address(memory))

    def close(self) -> None:
        """Unpin everything; idempotent."""
        for address in list(self._pinned):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        nbytes = self._pinned.pop(address, 0)
        if nbytes:
            self.nbytes -= nbytes
            with self._context.pushed():
                call("cuMemHostUnregister", address)


def _address(memory: memoryview) -> int:
    if not memory.nbytes or memory.readonly:
        raise InternalError("expected a segment of at least one byte, and a writable one, to pin")
    # Nothing of it is kept: whoever owns the memory may release its view at any time.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
