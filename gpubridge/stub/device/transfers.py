"""Copies that belong together, on streams of their own: no request waits for another's.

A stream that waits for a model's long kernel is another response's as little as that kernel is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Set as AbstractSet
from typing import Protocol

from gpubridge.cuda_ipc import CopyCounts, CopyMark, CopyStream, CudaError, DeviceContext
from gpubridge.stub.device.over import precede
from gpubridge.tensor.device_bytes import DeviceBytes

_STREAMS = 4
"""Made when the device is needed: none is made for a request, unless as many threads wait for theirs."""


class CopyStreams:
    """Lends streams of a ``context``; any thread may ask. Attribute ``counts``: of all their work."""

    def __init__(self, context: DeviceContext) -> None:
        self.counts = CopyCounts()
        self.context = context
        self._lock = threading.Lock()
        self._idle: deque[CopyStream] = deque()
        # No caller waits for work that was begun on these.
        self._unfinished: deque[CopyStream] = deque()
        try:
            for _ in range(_STREAMS):
                self._idle.append(CopyStream(context, self.counts))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back the streams that have nothing to do."""
        while self._idle:
            self._idle.pop().close()

    def take(self) -> CopyStream:
        """Lend a stream that no other transfer has: one that has nothing to do, if there is one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            for _ in range(len(self._unfinished)):
                stream = self._unfinished.popleft()
                if stream.done():
                    return stream
                self._unfinished.append(stream)
            if self._unfinished:
                return self._unfinished.popleft()
            return CopyStream(self.context, self.counts)

    def give_back(self, stream: CopyStream, *, idle: bool) -> None:
        """Take a stream back; takes no lock: a finalizer may be who does not need it any more."""
        (self._idle if idle else self._unfinished).append(stream)


class OrderingStream:
    """A stream for one tensor of a library; goes back with this object.

    No stream is taken before a library asks for its handle. ``events``: whose events mark others.
    """

    def __init__(self, streams: CopyStreams, events: CopyStream) -> None:
        self._streams = streams
        self._events = events
        self._stream: CopyStream | None = None

    @property
    def handle(self) -> int:
        """The ``CUstream``, which the library lets wait for its tensor."""
        if self._stream is None:
            self._stream = self._streams.take()
        return self._stream.handle

    def mark(self, stream: int | None = None) -> CopyMark:
        """Mark what a library's stream has to do now, or the one that has been lent."""
        if stream is None:
            return self._events.mark(self.handle)
        self._events.outlast(stream)
        return self._events.mark(stream)

    def __del__(self) -> None:
        if self._stream is not None:
            self._streams.give_back(self._stream, idle=False)


class Memory(Protocol):
    """The device's memory, as far as copies need it; for any thread."""

    def allocate_device(self, nbytes: int) -> DeviceBytes:
        """Return undefined bytes in the arena."""

    def keep_until(self, mark: CopyMark, kept: object) -> None:
        """Hold something until a mark has passed."""

    def collect(self, stream: CopyStream, behind: AbstractSet[int]) -> list[object]:
        """Return what `OverMemory.collect` does."""

    def passed(self, over: list[object]) -> None:
        """Give back what was collected, the stream having been waited for."""


class Transfers:
    """Work on the device for one response, or one copy for the model: `finish` or `leave` it.

    Not for several threads.
    """

    def __init__(self, streams: CopyStreams, memory: Memory) -> None:
        self._streams = streams
        self._memory = memory
        self._stream: CopyStream | None = None
        # What the stream reads and writes, and the model's streams on which that is made.
        self._used: list[object] = []
        self._behind: set[int] = set()

    @property
    def stream(self) -> CopyStream:
        """The stream, which is somebody else's afterwards."""
        if self._stream is None:
            self._stream = self._streams.take()
        return self._stream

    def read(self, data: DeviceBytes, target: memoryview) -> None:
        """Begin to copy bytes of the device to the host, in order; where that is not pinned, waits."""
        self.order(data)
        self._used += (data, target)
        self.stream.d2h(target, data.pointer, data.nbytes)

    def write(self, data: DeviceBytes, pointer: int) -> None:
        """Begin to copy bytes of the device to another place there, in order."""
        self.order(data)
        self._used.append(data)
        self.stream.d2d(pointer, data.pointer, data.nbytes)

    def load(self, memory: memoryview, pointer: int) -> None:
        """Begin to copy host memory to a place of the device."""
        self._used.append(memory)
        self.stream.h2d(pointer, memory, memory.nbytes)

    def order(self, data: DeviceBytes) -> None:
        """Let :meth:`finish` wait for all that is written to bytes by now."""
        data.order_into(self.stream)
        self._behind.update(data.streams, data.owner_streams or ())

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Begin to copy host memory into the arena."""
        data = self._memory.allocate_device(memory.nbytes)
        self._used.append(data)
        self.load(memory, data.pointer)
        data.ready = self.stream
        return data

    def copy(self, data: DeviceBytes) -> DeviceBytes:
        """Begin to copy bytes into the arena, in order; `ready` is good until this is left."""
        copy = self._memory.allocate_device(data.nbytes)
        self._used.append(copy)
        self.write(data, copy.pointer)
        # Its library may use the memory again before the copy is made: as the model does with a
        # buffer of its own for each request, and the library's allocator with what is let go of.
        for stream in data.owner_streams or ():
            precede(self.stream, stream)
        copy.ready = self.stream
        return copy

    def finish(self) -> None:
        """Wait once for all that was begun; CudaError if it failed.

        What is over then goes back, as far as this has waited for who used it.
        """
        with self._streams.context.pushed():
            over = self._memory.collect(self.stream, self._behind)
            self.stream.wait()
        self._used.clear()
        self._give_back(idle=True)
        self._memory.passed(over)

    def leave(self) -> CopyMark | None:
        """Wait for nothing; return what tells that all is done, None if it is.

        What is used stays until then.
        """
        if self._stream is None:
            return None
        try:
            mark = self._stream.mark()
        except CudaError:
            self.finish()
            return None
        if self._used:
            self._memory.keep_until(mark, self._used)
        self._give_back(idle=False)
        return mark

    def __del__(self) -> None:
        self._give_back(idle=False)

    def _give_back(self, *, idle: bool) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._streams.give_back(stream, idle=idle)
