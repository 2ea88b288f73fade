"""Copies of inputs from the host to the GPU, on a stream of their own: beside what the model does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpubridge.cuda_ipc import CopyMark, CopyStream, CudaError, DeviceContext
from gpubridge.stub.device.over import DeviceHold
from gpubridge.tensor.device_bytes import DeviceBytes


class Uploads:
    """Begins uploads on a stream of their own; holds the host memory that they read until the end.

    Each request's are waited for by a mark of its own, never by all that the stream has to do: that
    may be the next request's by then.
    """

    def __init__(self, context: DeviceContext) -> None:
        self.stream = CopyStream(context)
        # What is read, in the stream's order.
        self._under_way: deque[tuple[CopyMark, list[memoryview]]] = deque()

    def begin(self, copies: Sequence[tuple[memoryview, DeviceBytes]]) -> None:
        """Begin to copy the inputs of one request to the arena; `ready` tells when all are there.

        No slot goes back, nor its memory on the host, before that; neither when this raises
        CudaError.
        """
        try:
            for memory, data in copies:
                self.stream.h2d(data.pointer, memory, memory.nbytes)
        finally:
            mark = self._mark()
            if mark is not None:
                self._under_way.append((mark, [memory for memory, _ in copies]))
                for _, data in copies:
                    data.ready = mark
                    if isinstance(data.owner, DeviceHold):
                        data.owner.filled = mark

    def _mark(self) -> CopyMark | None:
        """Mark what was begun; None where that is done, since no mark could be made."""
        try:
            return self.stream.mark()
        except CudaError:
            self.stream.wait()
            return None

    @property
    def busy(self) -> bool:
        """Whether host memory may still be read."""
        return bool(self._under_way)

    def sweep(self) -> None:
        """Let go of the host memory that was read; one thread at a time. May raise CudaError."""
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()

    def close(self) -> None:
        """Wait until no host memory is read any more."""
        try:
            self.stream.close()
        except CudaError:
            # The context is lost, and goes with the process.
            pass
        self._under_way.clear()
