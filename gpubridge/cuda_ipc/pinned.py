"""Pinned host memory: registered with the driver in pieces, and copied in the same pieces.

The driver registers memory under a lock that the calls of all processes wait for, at 1 to 2 GB/s if
pages have to be allocated. So the kernel allocates them before, and no call registers more than 64 MiB.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CudaError, call
from gpubridge.errors import InternalError

PIECE_BYTES = 64 << 20
# For the contexts of all devices.
_PORTABLE = 1
_POPULATE_WRITE = 23
_PAGE = 4096

# Sorted addresses at which one registration ends and the next begins. Replaced, never changed: other
# threads read it without a lock.
_borders: list[int] = []
_planning = threading.Lock()

# Python's own `mmap.madvise` holds the interpreter's lock.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def pieces_of(memory: memoryview) -> list[memoryview]:
    """Cut memory into the pieces in which it is pinned."""
    return [memory[at : at + PIECE_BYTES] for at in range(0, memory.nbytes, PIECE_BYTES)]


def plan_pinning(memory: memoryview) -> None:
    """Copy memory in the pieces in which it will be pinned, from now on."""
    borders = _borders_in(memory)
    if borders:
        with _planning:
            _replace_borders([*_borders, *borders])


def forget_pinning(memory: memoryview) -> None:
    """Undo `plan_pinning` when no piece of the memory is pinned any more."""
    gone = set(_borders_in(memory))
    if gone:
        with _planning:
            _replace_borders([border for border in _borders if border not in gone])


def copied_pieces(memory: memoryview, nbytes: int) -> Iterable[tuple[int, memoryview, int]]:
    """Split a copy's host memory where registrations end; return offset, memory and size of each piece.

    The driver refuses to copy memory that is partly registered, as it is while it is being pinned.
    """
    borders = _borders
    if not borders or not nbytes:
        return ((0, memory, nbytes),)
    import numpy as np  # noqa: PLC0415  (most of the start of a process that checks a device)

    whole = np.frombuffer(memory, np.uint8)
    address = whole.ctypes.data
    inside = borders[bisect_right(borders, address) : bisect_left(borders, address + nbytes)]
    cuts = [0, *(border - address for border in inside), nbytes]
    return [(start, whole[start:end].data, end - start) for start, end in zip(cuts, cuts[1:])]


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
        """Pin memory as one piece until `unpin`; return whether it is pinned now (else see ``reason``).

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


def _borders_in(memory: memoryview) -> range:
    """Return the addresses between the pieces of memory."""
    first = _address(memory) + PIECE_BYTES
    return range(first, first - PIECE_BYTES + memory.nbytes, PIECE_BYTES)


def _replace_borders(borders: list[int]) -> None:
    global _borders  # noqa: PLW0603  (once per process, as what is registered)
    _borders = sorted(borders)


def _make_pages(address: int, memory: memoryview) -> None:
    """Allocate all pages of memory, which others may write to meanwhile."""
    if _madvise(address, memory.nbytes, _POPULATE_WRITE):
        # Linux before 5.14: reading allocates pages of shared memory too, and cannot undo a write.
        bytes(memory[::_PAGE])


def _address(memory: memoryview) -> int:
    if not memory.nbytes or memory.readonly:
        raise InternalError("expected a segment of at least one byte, and a writable one, to pin")
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
