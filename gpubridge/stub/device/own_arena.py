"""A stub's own device arena, which holds the tensors that it gives to others; it grows on demand.

The server allocates it in segments, so that it outlives the stub; each segment is a region. A segment
is as large as all before it together, so that there are few, or as large as a tensor needs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from gpubridge.cuda_ipc import CudaError, DeviceArena, DeviceSlot
from gpubridge.cuda_ipc.arena import full_error, slot_bytes
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.stub.device.regions import DeviceRegions, OpenedRegion
from gpubridge.transport.leases import BorrowedMemory

if TYPE_CHECKING:
    from gpubridge.stub.bls.calls import ControlRequest

_FIRST = 32 << 20
_GRANULARITY = 2 << 20


class _ArenaSegment(NamedTuple):
    region: OpenedRegion
    slots: DeviceArena


class OwnArena:
    """Allocates slots in the stub's own segments, for any thread.

    - ``limit``: bytes of all segments together.
    - ``ask``: requests a segment from the server (`BlsClient.ask`).
    - ``private``: the reason why no other process can open the memory; empty if others can.
    - ``on_private``: called with the reason when that is found out.

    Attribute ``lease_books``: resolve references into the segments, since tensors may come back.
    """

    def __init__(
        self,
        limit: int,
        regions: DeviceRegions,
        ask: Callable[..., ControlRequest],
        private: str,
        on_private: Callable[[str], None],
    ) -> None:
        self.limit = -(-limit // _GRANULARITY) * _GRANULARITY
        self.lease_books: list[BorrowedMemory] = []
        self._private = private
        self._regions = regions
        self._ask = ask
        self._on_private = on_private
        self._growing = threading.Lock()
        # Replaced, never changed: readers take no lock.
        self._segments: tuple[_ArenaSegment, ...] = ()

    def first(self) -> OpenedRegion:
        """Return the first region, which comes with the events of this stub."""
        segments = self._segments
        while not segments:
            self.grow(1)
            segments = self._segments
        return segments[0].region

    def try_allocate(self, nbytes: int) -> DeviceSlot | None:
        """Return a slot of undefined bytes; None if no segment has space."""
        for segment in self._segments:
            slot = segment.slots.try_allocate(nbytes)
            if slot is not None:
                return slot
        return None

    def free(self, slot: DeviceSlot) -> None:
        """Free a slot, which no stream uses any more."""
        for segment in self._segments:
            if segment.slots.segment is slot.segment:
                segment.slots.free(slot)

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Return a slot of undefined bytes, in a new segment if no other has space.

        Raises BridgeError: UNAVAILABLE at the limit, or without device memory.
        """
        while True:
            slot = self.try_allocate(nbytes)
            if slot is not None:
                return slot
            if not self.grow(nbytes):
                raise self.full_error(nbytes)

    def full_error(self, nbytes: int) -> BridgeError:
        """Return the error for an allocation that the arena has no space for."""
        segments = self._segments
        left = self.limit - _total_bytes(segments)
        lent = sum(segment.slots.lent()[1] for segment in segments)
        largest = max([left, *(segment.slots.largest() for segment in segments)])
        return full_error(nbytes, self.limit, lent, largest)

    def find(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Return region and offset of bytes in a segment; None if they are elsewhere."""
        for region, _ in self._segments:
            offset = pointer - region.pointer
            if offset >= 0 and offset + nbytes <= region.size:
                return region.region, offset
        return None

    def grow(self, nbytes: int) -> bool:
        """Add a segment of at least ``nbytes``; return False if the limit forbids it."""
        before = self._segments
        size = slot_bytes(nbytes)
        with self._growing:
            if self._segments is not before:
                # Another thread has added one meanwhile.
                return True
            # It would keep segments that are released below.
            del before
            if size <= self.limit < _total_bytes(self._segments) + size:
                self._release_idle()
            total = _total_bytes(self._segments)
            left = self.limit - total
            if size > left:
                return False
            region = self._new_region(max(size, min(left, max(_FIRST, total))))
            for book in self.lease_books:
                book.add_segment(region)
            self._segments = (*self._segments, _ArenaSegment(region, DeviceArena(region.segment)))
            return True

    def _new_region(self, nbytes: int) -> OpenedRegion:
        """Get a segment from the server, or allocate a private one; may raise BridgeError."""
        if not self._private:
            region = self._request_region(nbytes)
            if region is not None:
                return region
        self._on_private(self._private)
        return self._regions.make_private(nbytes)

    def _request_region(self, nbytes: int) -> OpenedRegion | None:
        refused = ""
        while True:
            first = not self._segments
            answer = self._ask("device_memory", nbytes=nbytes, refused=refused, events=first)
            offered: dict[str, Any] = answer.answer
            if offered["reason"]:
                self._private = offered["reason"]
                return None
            region = self._regions.announce(offered, answer.fds)
            try:
                region.opened()
            except CudaError as error:
                if error.sticky or error.code is ErrorCode.UNAVAILABLE:
                    raise
                refused = error.message
            else:
                return region
            # The server has to learn that it is closed before the next request.
            del region
            self._regions.finish()

    def _release_idle(self) -> None:
        """Release segments without allocated slots to make space for a new one.

        The first one stays: others may wait for its events.
        """
        idle = [segment.region.region for segment in self._segments[1:] if segment.slots.retire()]
        self._segments = tuple(
            segment for segment in self._segments if segment.region.region not in idle
        )
        for region in idle:
            for book in self.lease_books:
                book.drop(region)
        if idle:
            # The server has to learn of it before the next request.
            self._regions.finish()


def _total_bytes(segments: Sequence[_ArenaSegment]) -> int:
    return sum(segment.region.size for segment in segments)
