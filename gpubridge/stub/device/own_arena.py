"""A stub's own device memory, from which it hands tensors on: made at first need, and by use.

The server makes it, a segment at a time, so that it outlives the stub; each is a region of its own. A
segment may be as large as all before it together, so that few are made, or as one tensor needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from gpubridge.cuda_ipc import CudaError, DeviceArena, DeviceSlot
from gpubridge.cuda_ipc.arena import no_room, slot_bytes
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.stub.device.regions import DeviceRegions, OpenedRegion
from gpubridge.transport.leases import BorrowedMemory

if TYPE_CHECKING:
    from gpubridge.stub.questions import Question

_FIRST = 32 << 20
_GRANULARITY = 2 << 20


class _Piece(NamedTuple):
    region: OpenedRegion
    slots: DeviceArena


class OwnArena:
    """Lends slots of the stub's own segments; any thread may ask, or free.

    - ``limit``: bytes of all segments together.
    - ``ask``: asks the server for a segment (`BlsClient.ask`).
    - ``alone``: why no other process can have the memory open; empty as far as others can.
    - ``keep_alone``: told when that is found out.

    Attribute ``books``: these know the segments, since their tensors may come back.
    """

    def __init__(
        self,
        limit: int,
        regions: DeviceRegions,
        ask: Callable[..., Question],
        alone: str,
        keep_alone: Callable[[str], None],
    ) -> None:
        self.limit = -(-limit // _GRANULARITY) * _GRANULARITY
        self.books: list[BorrowedMemory] = []
        self._alone = alone
        self._regions = regions
        self._ask = ask
        self._keep_alone = keep_alone
        self._growing = threading.Lock()
        # Never changed, but replaced: who looks at it needs no lock.
        self._pieces: tuple[_Piece, ...] = ()

    def first(self) -> OpenedRegion:
        """Return the region with which the events of this stub come."""
        pieces = self._pieces
        while not pieces:
            self.grow(1)
            pieces = self._pieces
        return pieces[0].region

    def take(self, nbytes: int) -> DeviceSlot | None:
        """Lend a slot of undefined bytes; None where no segment has room."""
        for piece in self._pieces:
            slot = piece.slots.take(nbytes)
            if slot is not None:
                return slot
        return None

    def free(self, slot: DeviceSlot) -> None:
        """Take a slot back, which no stream may use any more."""
        for piece in self._pieces:
            if piece.slots.segment is slot.segment:
                piece.slots.free(slot)

    def allocate(self, nbytes: int) -> DeviceSlot:
        """Lend a slot of undefined bytes, of a new segment where no other has room.

        Raises BridgeError: UNAVAILABLE at the limit, or without device memory.
        """
        while True:
            slot = self.take(nbytes)
            if slot is not None:
                return slot
            if not self.grow(nbytes):
                raise self.no_room(nbytes)

    def no_room(self, nbytes: int) -> BridgeError:
        """Say why the arena has no room for so many bytes."""
        pieces = self._pieces
        left = self.limit - _held(pieces)
        lent = sum(piece.slots.lent()[1] for piece in pieces)
        largest = max([left, *(piece.slots.largest() for piece in pieces)])
        return no_room(nbytes, self.limit, lent, largest)

    def place(self, pointer: int, nbytes: int) -> tuple[int, int] | None:
        """Return region and offset of bytes in a segment; None for those that lie elsewhere."""
        for region, _ in self._pieces:
            offset = pointer - region.pointer
            if offset >= 0 and offset + nbytes <= region.size:
                return region.region, offset
        return None

    def grow(self, nbytes: int) -> bool:
        """Add a segment with room for so many bytes; returns False where the limit forbids it."""
        before = self._pieces
        size = slot_bytes(nbytes)
        with self._growing:
            if self._pieces is not before:
                # Another thread has added one meanwhile.
                return True
            # It would keep what is given back.
            del before
            if size <= self.limit < _held(self._pieces) + size:
                self._give_back_idle()
            held = _held(self._pieces)
            left = self.limit - held
            if size > left:
                return False
            region = self._made(max(size, min(left, max(_FIRST, held))))
            for book in self.books:
                book.know(region)
            self._pieces = (*self._pieces, _Piece(region, DeviceArena(region.segment)))
            return True

    def _made(self, nbytes: int) -> OpenedRegion:
        """Get a segment of the server, or make one where that cannot be; may raise BridgeError."""
        if not self._alone:
            region = self._given(nbytes)
            if region is not None:
                return region
        self._keep_alone(self._alone)
        return self._regions.make_private(nbytes)

    def _given(self, nbytes: int) -> OpenedRegion | None:
        refused = ""
        while True:
            first = not self._pieces
            answer = self._ask("device_memory", nbytes=nbytes, refused=refused, events=first)
            offered: dict[str, Any] = answer.answer
            if offered["reason"]:
                self._alone = offered["reason"]
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
            # The server hears that it is not open before it is asked again.
            del region
            self._regions.finish()

    def _give_back_idle(self) -> None:
        """Give segments back of which no slot is lent, for the sake of another.

        Not the first one: others may wait for its events.
        """
        idle = [piece.region.region for piece in self._pieces[1:] if piece.slots.retire()]
        self._pieces = tuple(piece for piece in self._pieces if piece.region.region not in idle)
        for region in idle:
            for book in self.books:
                book.drop(region)
        if idle:
            # The server hears of it before it is asked for more.
            self._regions.finish()


def _held(pieces: Sequence[_Piece]) -> int:
    return sum(piece.region.size for piece in pieces)
