"""Deferred-free queue: device memory is reclaimed once every stream that used it has completed.

A separate stream is ordered behind those streams; when it has passed, the memory is released.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence, Set as AbstractSet
from itertools import accumulate
from typing import Callable, Optional

from gpubridge.cuda_ipc import CopyMark, CopyStream, CudaError, DeviceSegment, DeviceSlot
from gpubridge.cuda_ipc.driver import CAPTURES
from gpubridge.tensor.device_bytes import DeviceBytes, ReadyTogether
from gpubridge.tensor.streams import UsedStreams

_Deferred = deque[tuple[object, UsedStreams, Optional[CopyMark]]]
"""Unreferenced memory, each with the streams that used it and the mark that ends its upload."""

_CLIENT_POLLS = 50


class DeviceLease:
    """Keeps ``memory`` for tensors: a slot of the arena, or memory of another process.

    ``streams`` may use the memory; ``filled`` marks the end of an upload into it.
    """

    __slots__ = ("__weakref__", "_deferred", "filled", "memory", "streams")

    def __init__(self, memory: object, deferred: DeferredFree) -> None:
        self.memory = memory
        self.streams: UsedStreams = {}
        self.filled: CopyMark | None = None
        self._deferred = deferred

    @property
    def segment(self) -> DeviceSegment | None:
        """The allocation that the memory is a part of; None if it is not known."""
        if isinstance(self.memory, DeviceSlot):
            return self.memory.segment
        # Else a view, and the region that it is a reference to.
        return self.memory[1].segment if isinstance(self.memory, tuple) else None

    def __del__(self) -> None:
        self._deferred.add(self.memory, self.filled, self.streams)


def view_of_adjacent(parts: Sequence[DeviceBytes]) -> DeviceBytes | None:
    """Return leased bytes that lie one after another as one; None where they do not.

    Different allocations are never viewed as one: the driver copies none across their boundary.
    """
    starts = accumulate((part.nbytes for part in parts), initial=parts[0].pointer)
    if any(part.pointer != start for part, start in zip(parts, starts)):
        return None
    leases = [part.owner for part in parts if isinstance(part.owner, DeviceLease)]
    segments = {lease.segment for lease in leases}
    if len(leases) != len(parts) or len(segments) != 1 or None in segments:
        return None
    # A stream that uses the view uses each part, and the other way round.
    streams: UsedStreams = {}
    for part, lease in zip(parts, leases):
        for stream, holders in part.streams.items():
            streams.setdefault(stream, []).extend(holders)
        part.streams = lease.streams = streams
    marks = [part.ready for part in parts if part.ready is not None]
    return DeviceBytes(
        parts[0].pointer,
        sum(part.nbytes for part in parts),
        parts[0].ordinal,
        list(parts),
        ReadyTogether(marks) if marks else None,
        read_only=any(part.read_only for part in parts),
        shared=any(part.shared for part in parts),
        streams=streams,
    )


def order_after(copies: CopyStream, stream: int) -> None:
    """Order later work of the bridge's stream after the current work of a model's stream."""
    try:
        copies.order_after(stream)
    except CudaError as error:
        if error.sticky or error.status in CAPTURES:
            raise
        # The stream is destroyed: only a device-wide wait covers its work.
        copies.wait_for_all()


def order_before(copies: CopyStream, stream: int) -> None:
    """Order later work of a model's stream after the current work of the bridge's stream."""
    try:
        copies.order_before(stream)
    except CudaError as error:
        # A destroyed stream gets no more work.
        if error.sticky:
            raise


class DeferredFree:
    """Releases unreferenced memory: slots by ``free``, all else by dropping the last reference.

    Finalizers only append to the queue, and call ``wake``. `collect`, `release_collected` and `reclaim` are called by
    one thread at a time; after a CudaError the memory stays queued. ``stream`` is used only to be
    ordered behind the streams that used the memory.
    """

    def __init__(
        self, stream: CopyStream, free: Callable[[DeviceSlot], None], wake: Callable[[], None]
    ) -> None:
        self.stream = stream
        self._free = free
        self._wake = wake
        self._deferred: _Deferred = deque()
        # Memory that ``stream`` is ordered behind, before and after the mark is recorded.
        self._unmarked: list[object] = []
        self._marked: deque[tuple[CopyMark, list[object]]] = deque()

    @property
    def pending(self) -> bool:
        """Return whether streams may still use unreferenced memory."""
        return bool(self._marked or self._unmarked or self._deferred)

    def lease(self, memory: object) -> DeviceLease:
        """Return a lease; its memory is queued when the lease is finalized."""
        return DeviceLease(memory, self)

    def add(self, memory: object, mark: CopyMark | None, streams: UsedStreams) -> None:
        """Release memory when a mark has passed, and some streams; finalizers may use this."""
        self._deferred.append((memory, streams, mark))
        self._wake()

    def reclaim(self) -> None:
        """Release memory that no stream uses any more, without waiting."""
        self._sweep()
        self._unmarked += self.collect(self.stream)
        if self._unmarked:
            self._marked.append((self.stream.mark(), self._unmarked))
            marked, self._unmarked = self._unmarked, []
            self._poll_client_memory(marked)
            self._sweep()

    def collect(self, stream: CopyStream, behind: AbstractSet[int] | None = None) -> list[object]:
        """Order a stream behind all users of queued memory, and return that memory.

        Unused memory is released at once. Memory stays queued while a graph is captured on a stream
        that uses it, and, if ``behind`` is given, when other streams than those use it.
        """
        found: _Deferred = deque()
        left: _Deferred = deque()
        try:
            captured = functools.cache(self.stream.captured)
            while self._deferred:
                memory, streams, filled = each = self._deferred[0]
                filling = filled is not None and not filled.done()
                busy = any(map(captured, streams))
                self._deferred.popleft()
                if not filling and not streams:
                    # This may finalize further leases, which are queued behind.
                    self._release([memory])
                    del memory, each
                    continue
                beyond = behind is not None and (filling or not streams.keys() <= behind)
                if beyond or busy:
                    left.append(each)
                    continue
                found.append(each)
                if filled is not None and filling:
                    filled.order_before(stream.handle)
            # `found` keeps the streams until this returns.
            for used in set().union(*(streams for _, streams, _ in found)):
                order_after(stream, used)
        except BaseException:
            left += found
            raise
        finally:
            self._deferred.extendleft(reversed(left))
        return [memory for memory, _, _ in found]

    def release_collected(self, collected: list[object]) -> None:
        """Release collected memory, after its stream was waited for."""
        self._release(collected)
        self.reclaim()

    def _poll_client_memory(self, marked: list[object]) -> None:
        """Poll the newest mark for a moment: a client may unregister its memory at once."""
        if not any(type(memory) is tuple and memory[1].client for memory in marked):
            return
        for _ in range(_CLIENT_POLLS):
            if self._marked[-1][0].done():
                return

    def _sweep(self) -> None:
        while self._marked and self._marked[0][0].done():
            self._release(self._marked.popleft()[1])

    def _release(self, released: list[object]) -> None:
        for memory in released:
            if isinstance(memory, DeviceSlot):
                self._free(memory)
        # Leases and regions are released with the last reference.
        released.clear()


class Uploads:
    """Starts uploads on a separate stream; keeps the host memory that they read until they end.

    Each request waits for its own mark, never for the whole stream, which may already upload the
    inputs of the next request.
    """

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        # Host memory that is being read, in the stream's order.
        self._under_way: deque[tuple[CopyMark, list[memoryview]]] = deque()

    def begin(self, copies: Sequence[tuple[memoryview, DeviceBytes]]) -> None:
        """Start to copy the inputs of one request to the arena; `ready` tells when they are there.

        Slots and host memory are kept until then, also when this raises CudaError.
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
                    if isinstance(data.owner, DeviceLease):
                        data.owner.filled = mark

    def _mark(self) -> CopyMark | None:
        """Mark the end of the copies; without an event, wait for it and return None."""
        try:
            return self.stream.mark()
        except CudaError:
            self.stream.wait()
            return None

    @property
    def busy(self) -> bool:
        """Return whether uploads may still read host memory."""
        return bool(self._under_way)

    def sweep(self) -> None:
        """Release host memory whose upload has ended; one thread at a time. May raise CudaError."""
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()

    def close(self) -> None:
        """Wait until no host memory is read any more."""
        try:
            self.stream.close()
        except CudaError:
            # The context is lost, and ends with the process.
            pass
        self._under_way.clear()
