"""Copies that belong together, on one stream each: no request waits for the copies of another.

A stream that waits for a model's long kernel must not delay another response.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from gpubridge.cuda_ipc import CopyCounts, CopyMark, CopyStream, CudaError, DeviceContext
from gpubridge.stub.device.deferred_free import order_before
from gpubridge.tensor.device_bytes import DeviceBytes

if TYPE_CHECKING:
    from gpubridge.stub.device.memory import StubDevice

_STREAMS = 4
"""Streams made in advance: a request makes one only while so many others are in use."""


class CopyStreams:
    """Pool of streams of a ``context``, for any thread. Attribute ``counts``: of all their work."""

    def __init__(self, context: DeviceContext) -> None:
        self.counts = CopyCounts()
        self.context = context
        self._lock = threading.Lock()
        self._idle: deque[CopyStream] = deque()
        # Streams whose work no caller has waited for.
        self._unfinished: deque[CopyStream] = deque()
        try:
            for _ in range(_STREAMS):
                self._idle.append(CopyStream(context, self.counts))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the idle streams."""
        while self._idle:
            self._idle.pop().close()

    def acquire(self) -> CopyStream:
        """Return a stream for exclusive use, preferably an idle one."""
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

    def release(self, stream: CopyStream, *, idle: bool) -> None:
        """Return a stream to the pool; takes no lock, since finalizers call this."""
        (self._idle if idle else self._unfinished).append(stream)


class OrderingStream:
    """A stream for one tensor of a library; returned to the pool with this object.

    The stream is acquired when a library asks for its handle. ``events`` makes the marks.
    """

    def __init__(self, streams: CopyStreams, events: CopyStream) -> None:
        self._streams = streams
        self._events = events
        self._stream: CopyStream | None = None

    @property
    def handle(self) -> int:
        """The ``CUstream``, which the library orders after its tensor."""
        if self._stream is None:
            self._stream = self._streams.acquire()
        return self._stream.handle

    def mark(self, stream: int | None = None) -> CopyMark:
        """Mark the current work of a library's stream, or of this one."""
        if stream is None:
            return self._events.mark(self.handle)
        return self._events.mark_uncaptured(stream)

    def __del__(self) -> None:
        if self._stream is not None:
            self._streams.release(self._stream, idle=False)


class Transfers:
    """Copies for one response, or for the model, that end with `finish` or `detach`.

    Used by one thread.
    """

    def __init__(self, streams: CopyStreams, memory: StubDevice) -> None:
        self._streams = streams
        self._memory = memory
        self._stream: CopyStream | None = None
        # Memory that the stream reads and writes, and the model's streams that it is ordered behind.
        self._used: list[object] = []
        self._behind: set[int] = set()

    @property
    def stream(self) -> CopyStream:
        """The stream, for exclusive use until `finish` or `detach`."""
        if self._stream is None:
            self._stream = self._streams.acquire()
        return self._stream

    def read(self, data: DeviceBytes, target: memoryview) -> None:
        """Start to copy bytes of the device to the host, in order; waits if that is not pinned."""
        self.order(data)
        self._used += (data, target)
        self.stream.d2h(target, data.pointer, data.nbytes)

    def write(self, data: DeviceBytes, pointer: int) -> None:
        """Start to copy bytes to another place on the device, in order."""
        self.order(data)
        self._used.append(data)
        self.stream.d2d(pointer, data.pointer, data.nbytes)

    def load(self, memory: memoryview, pointer: int) -> None:
        """Start to copy host memory to a place on the device."""
        self._used.append(memory)
        self.stream.h2d(pointer, memory, memory.nbytes)

    def order(self, data: DeviceBytes) -> None:
        """Let :meth:`finish` wait for everything submitted so far that writes to some bytes."""
        data.order_into(self.stream)
        self._behind.update(data.streams, data.owner_streams or ())

    def upload(self, memory: memoryview) -> DeviceBytes:
        """Start to copy host memory into the arena."""
        data = self._memory.allocate_device(memory.nbytes)
        self._used.append(data)
        self.load(memory, data.pointer)
        data.ready = self.stream
        return data

    def copy(self, *parts: DeviceBytes) -> DeviceBytes:
        """Start to copy bytes, one after another, into the arena, in order.

        `ready` of the copy is valid until `detach`.
        """
        copy = self._memory.allocate_device(sum(data.nbytes for data in parts))
        self._used.append(copy)
        end = copy.pointer
        for data in parts:
            self.write(data, end)
            end += data.nbytes
            # The model, or the library's allocator, may write to the memory again before the copy is
            # complete.
            for stream in data.owner_streams or ():
                order_before(self.stream, stream)
        copy.ready = self.stream
        return copy

    def finish(self) -> None:
        """Wait once for all copies; CudaError if one failed.

        Releases unreferenced memory whose users were waited for thereby.
        """
        with self._streams.context.pushed():
            collected = self._memory.collect(self.stream, self._behind)
            self.stream.wait()
        self._used.clear()
        self._release_stream(idle=True)
        self._memory.release_collected(collected)

    def detach(self) -> CopyMark | None:
        """Return a mark of the copies' end without waiting, or None if they are complete.

        The memory that they use is kept until then.
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
        self._release_stream(idle=False)
        return mark

    def __del__(self) -> None:
        self._release_stream(idle=False)

    def _release_stream(self, *, idle: bool) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._streams.release(stream, idle=idle)
