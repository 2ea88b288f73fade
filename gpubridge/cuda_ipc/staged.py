"""Copies between a device and host memory that is not pinned, through pinned pieces.

The driver would do that one piece at a time, while the caller spins on a processor. Here several threads
copy, so that one piece crosses to or from the device while others are copied on the host.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import CopyStream
from gpubridge.cuda_ipc.driver import CudaError, call

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 2 << 20
_PIECES = 8
"""Pieces that may be pinned at once, for all copies together."""
_HELPERS = 3
"""Threads beside the caller's: one thread copies host memory at a fraction of PCIe's rate."""
_PORTABLE = 1

Part = tuple[int, memoryview]
"""An address on the device, and host memory of the same size as the bytes there."""


class StagedCopies:
    """Copies between one device and pageable memory, for any thread, which waits until they are done.

    Stream, threads and pieces are created by the first copies. Pieces are pageable if memory cannot be
    pinned.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self._stream: CopyStream | None = None
        self._helpers: ThreadPoolExecutor | None = None
        self._creating = threading.Lock()
        self._free: deque[memoryview] = deque()
        self._available = threading.Semaphore(_PIECES)
        self._pinned: list[int] = []

    def to_host(self, parts: Sequence[Part]) -> None:
        """Copy complete bytes of the device to the host; or raise CudaError."""
        self._copy_all(self._download, parts)

    def to_device(self, parts: Sequence[Part]) -> None:
        """Copy to the device, where it is complete on return; or raise CudaError."""
        self._copy_all(self._upload, parts)

    def close(self) -> None:
        """Free stream, threads and pieces when no copy is under way; idempotent."""
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
        """Copy all pieces with this thread and others; all have ended on return."""
        left = deque(_pieces(parts))
        helpers = self._prepare(several=len(left) > 1)

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
            # An error referred to by its own frames would keep the memory of the copy.
            others.clear()
            first = next((error for error in errors if error is not None), None)
            errors.clear()
        if first is not None:
            try:
                raise first
            finally:
                first = None

    def _prepare(self, *, several: bool) -> ThreadPoolExecutor | None:
        """Create the stream, and for several pieces the threads, which are returned."""
        with self._creating:
            if self._stream is None:
                self._stream = CopyStream(self._context)
            if several and self._helpers is None:
                # A stub that copies nothing large does not import it.
                from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

                self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix="copying")
        return self._helpers if several else None

    def _download(self, pointer: int, memory: memoryview) -> None:
        stream, nbytes = self._stream, memory.nbytes
        assert stream is not None
        with self._piece() as piece:
            try:
                stream.d2h(piece, pointer, nbytes)
            finally:
                stream.wait()
            _copy(memory, piece[:nbytes])

    def _upload(self, pointer: int, memory: memoryview) -> None:
        stream, nbytes = self._stream, memory.nbytes
        assert stream is not None
        with self._piece() as piece:
            _copy(piece[:nbytes], memory)
            try:
                stream.h2d(pointer, piece, nbytes)
            finally:
                stream.wait()

    @contextmanager
    def _piece(self) -> Iterator[memoryview]:
        """Provide a piece for exclusive use."""
        with self._available:
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
    import numpy as np  # noqa: PLC0415  (most of the start of a process that checks a device)

    # It releases the interpreter's lock meanwhile.
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))
