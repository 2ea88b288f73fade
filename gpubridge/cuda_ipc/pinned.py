"""Pinned host memory, registered with the driver.

The driver registers memory under a lock that the calls of all processes wait for, at 1 to 2 GB/s if
pages have to be allocated. So the kernel allocates them before. Each slot is registered in one call: the
driver refuses a copy, of whoever makes it, from or to memory that is partly registered, or of which
several registrations have parts.
"""

from __future__ import annotations

import ctypes

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CudaError, call
from gpubridge.errors import InternalError

# For the contexts of all devices.
_PORTABLE = 1
_POPULATE_WRITE = 23
_PAGE = 4096

# Python's own `mmap.madvise` holds the interpreter's lock.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinnedMemory:
    """Pins memory of this process for all devices, and tracks it; used by one thread.

    Copies of memory that cannot be pinned are slower, and their caller waits; ``reason`` is the last
    failure. ``nbytes`` are pinned now.
    """

    def __init__(self, context: DeviceContext) -> None:
        self.nbytes = 0
        self.reason = ""
        self._context = context
        # Pinned memory by address, which this keeps mapped.
        self._pinned: dict[int, memoryview] = {}

    def pin(self, memory: memoryview) -> bool:
        """Pin memory by one registration until `unpin`; return whether it is pinned now (else see ``reason``).

        Raises CudaError only if the context is lost.
        """
        address = _address(memory)
        pinned = self._pinned.get(address)
        if pinned is not None:
            if pinned.nbytes != memory.nbytes:
                raise InternalError(
                    f"{pinned.nbytes} bytes are pinned where {memory.nbytes} are asked for"
                )
            return True
        _make_pages(address, memory)
        try:
            with self._context.pushed():
                call("cuMemHostRegister", address, memory.nbytes, _PORTABLE)
        except CudaError as error:
            if error.sticky:
                raise
            self.reason = error.message
            return False
        self._pinned[address] = memory
        self.nbytes += memory.nbytes
        return True

    def unpin(self, memory: memoryview) -> None:
        """Unpin memory if it is pinned; waits for all copies of the process."""
        self._unpin(_address(memory))

    def close(self) -> None:
        """Unpin everything; idempotent."""
        for address in list(self._pinned):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        memory = self._pinned.pop(address, None)
        if memory is not None:
            self.nbytes -= memory.nbytes
            with self._context.pushed():
                call("cuMemHostUnregister", address)


def _make_pages(address: int, memory: memoryview) -> None:
    """Allocate all pages of memory, which others may write to meanwhile."""
    if _madvise(address, memory.nbytes, _POPULATE_WRITE):
        # Linux before 5.14: reading allocates pages of shared memory too, and cannot undo a write.
        bytes(memory[::_PAGE])


def _address(memory: memoryview) -> int:
    if not memory.nbytes or memory.readonly:
        raise InternalError("expected a segment of at least one byte, and a writable one, to pin")
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
