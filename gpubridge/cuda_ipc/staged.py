"""Copies between a device and host memory that is not pinned, by way of pinned pieces.

The driver would do that, too: a piece after the other, while the caller spins on a processor. Here several
threads copy pieces, so that one is on its way to or from the device while others are copied on the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable

import numpy as np

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream
from gpubridge.cuda_ipc.driver import CudaError, call

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 2 << 20
_PIECES = 8
"""Pieces that may be pinned at once, for all copies together."""
_HELPERS = 3
"""Threads beside the one that asks for a copy: one alone copies host memory at a fraction of PCIe's rate."""
_PORTABLE = 1

Part = tuple[int, memoryview]
"""A place on the device, and as much memory of the host."""


class StagedCopies:
    """Copies between one device and pageable memory; any thread may ask, and waits until it is done.

    Nothing is made before the first copy. Where memory cannot be pinned, pieces are pageable, too.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self._stream: CopyStream | None = None
        self._helpers: ThreadPoolExecutor | None = None
        self._making = threading.Lock()
        self._free: deque[memoryview] = deque()
        self._room = threading.Semaphore(_PIECES)
        self._pinned: list[int] = []

    def to_host(self, parts: Sequence[Part]) -> None:
        """Copy what is complete on the device to the host; or raise CudaError."""
        self._copy_all(self._down, parts)

    def to_device(self, parts: Sequence[Part]) -> None:
        """Copy to the device, where it is complete on return; or raise CudaError."""
        self._copy_all(self._up, parts)

    def close(self) -> None:
        """Give everything back, when no copy is under way; idempotent."""
        helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()
        self._free.clear()
        stream, self._stream = self._stream, None
        pinned, self._pinned = self._pinned, []
        try:
            if stream is not None:
                stream.close()
        finally:
            with self._context.pushed():
                for pointer in pinned:
                    call("cuMemFreeHost", pointer)

    def _copy_all(self, copy: Callable[[int, memoryview], None], parts: Sequence[Part]) -> None:
        """Copy all pieces, by this thread and others; all have ended on return."""
        left = deque(_pieces(parts))
        helpers = self._made(several=len(left) > 1)

        def copy_left() -> None:
            while left:
                try:
                    piece = left.popleft()
                except IndexError:
                    return
                try:
                    copy(*piece)
                except BaseException:
                    left.clear()
                    raise

        others = []
        if helpers is not None:
            others = [helpers.submit(copy_left) for _ in range(min(len(left) - 1, _HELPERS))]
        try:
            copy_left()
        finally:
            errors = [other.exception() for other in others if not other.cancel()]
            # An error whose frames hold it would keep the memory that was to be copied.
            others.clear()
            first = next((error for error in errors if error is not None), None)
            errors.clear()
        if first is not None:
            try:
                raise first
            finally:
                first = None

    def _made(self, *, several: bool) -> ThreadPoolExecutor | None:
        """Make what is not there yet; return the threads that help where there are several pieces."""
        with self._making:
            if self._stream is None:
                self._stream = CopyStream(self._context)
            if several and self._helpers is None:
                # A stub that copies nothing large does without it, and what comes with it.
                from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

                self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="copying")
        return self._helpers if several else None

    def _down(self, pointer: int, memory: memoryview) -> None:
        stream, nbytes = self._stream, memory.nbytes
        assert stream is not None
        with self._lent() as piece:
            try:
                stream.d2h(piece, pointer, nbytes)
            finally:
                stream.wait()
            _copy(memory, piece[:nbytes])

    def _up(self, pointer: int, memory: memoryview) -> None:
        stream, nbytes = self._stream, memory.nbytes
        assert stream is not None
        with self._lent() as piece:
            _copy(piece[:nbytes], memory)
            try:
                stream.h2d(pointer, piece, nbytes)
            finally:
                stream.wait()

    @contextmanager
    def _lent(self) -> Iterator[memoryview]:
        """Lend a piece while nothing is copied to or from it by others."""
        with self._room:
            try:
                piece = self._free.popleft()
            except IndexError:
                piece = self._new_piece()
            try:
                yield piece
            finally:
                self._free.append(piece)

    def _new_piece(self) -> memoryview:
        try:
            with self._context.pushed():
                pointer = int(call("cuMemHostAlloc", PIECE_BYTES, _PORTABLE))
        except CudaError as error:
            if error.sticky:
                raise
            return memoryview(bytearray(PIECE_BYTES))
        self._pinned.append(pointer)
        return memoryview((ctypes.c_char * PIECE_BYTES).from_address(pointer)).cast("B")


def _pieces(parts: Sequence[Part]) -> Iterator[Part]:
    for pointer, memory in parts:
        for at in range(0, memory.nbytes, PIECE_BYTES):
            yield pointer + at, memory[at : at + PIECE_BYTES]


def _copy(to: memoryview, source: memoryview) -> None:
    # NumPy releases the interpreter's lock meanwhile.
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
