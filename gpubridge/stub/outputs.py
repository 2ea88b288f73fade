"""The stub's output memory: slots that are lent to the server until it has sent them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from gpubridge.errors import BridgeError, unavailable
from gpubridge.host_shm import HostArena, Segment, Slot
from gpubridge.tensor.native import native
from gpubridge.transport.channel import ChannelClosed
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.leases import LentSlots

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64
_LARGE = 1 << 18
_MANY = 64
_KEPT = 10
"""A part of the memory is for small outputs: large ones that nobody reads may take the rest."""


class _Look(weakref.ref):  # type: ignore[type-arg]
    """Watches a model's look at a slot; all arrays that it makes of it refer to the one watched."""

    __slots__ = ("slot",)
    slot: Slot


class OutputMemory:
    """Places a response's tensors in one slot each time, and takes slots back when they were sent.

    Any thread may place.

    - ``table``: the lease bytes by which the server says that it is done with a slot.
    - ``on_create``, ``on_drop``: told of regions that come and go, before the server hears of
      anything in them.
    - ``foreign``: whether this is a forked child, to whom the memory does not belong.
    - ``shown``: whether a model has ever got a slot to write to.
    - ``spare``: gives back what others have reserved with leases and do not use; is asked when
      memory is short.
    """

    def __init__(
        self,
        owner: int,
        limit: int,
        table: memoryview,
        on_create: Callable[[Segment], None],
        on_drop: Callable[[Segment], None],
    ) -> None:
        self._copied = 0
        self._lock = threading.Lock()
        self.foreign = False
        compiled = native()
        self._place = _place if compiled is None else compiled.place
        self._arena = HostArena(owner, limit, on_create, on_drop, limit // _KEPT)
        self._lent = LentSlots(table, self.free)
        # Slots that a model looks at, and those of them that the server may look at, too.
        self._looks: dict[Slot, _Look] = {}
        self._sent: set[Slot] = set()
        self._looked: deque[_Look] = deque()
        self.shown = False
        self.spare: Callable[[], None] = _nothing

    def place(self, payloads: Sequence[Any], consumer: str = "") -> list[int]:
        """Copy C-contiguous payloads into a slot; returns the fields of all their references.

        ``consumer``: the model, or the ensemble, whose processes take them; their memory holds
        nothing else. Empty where only the server does.

        Raises BridgeError: UNAVAILABLE when the output memory is full; so do the other ways to get
        a slot.
        """
        total = copied = 0
        for payload in payloads:
            size = payload.nbytes
            copied += size
            total += (size + 63) & -_ALIGNMENT
        if total == 0:
            return [0, 0, 0, NO_LEASE] * len(payloads)
        with self._lock:
            slot = self._allocate(total, consumer)
            lease = self._lent.lend(slot)
            self._copied += copied
        return self._place(slot.memory, payloads, slot.segment.region, slot.offset, lease)

    def lend_to_model(self, nbytes: int, consumer: str = "") -> tuple[Slot, NDArray[np.uint8]]:
        """Give a model a slot to write an output for ``consumer`` to; returns it and its bytes.

        It comes back when no array refers to it any more, and the server, if it was sent, is done
        with it.
        """
        with self._lock:
            self.shown = True
            slot = self._allocate(max(nbytes, 1), consumer)
            memory = np.frombuffer(slot.memory, np.uint8)
            look = self._looks[slot] = _Look(memory, self._looked.append)
            look.slot = slot
        return slot, memory[:nbytes]

    def send(self, slot: Slot, nbytes: int) -> tuple[int, int, int, int] | None:
        """Lend the server a slot that a model has filled; None when it is on its way already."""
        with self._lock:
            if self.foreign or not nbytes or slot in self._sent or self._lent.exhausted:
                return None
            self._sent.add(slot)
            return slot.segment.region, slot.offset, nbytes, self._lent.lend(slot)

    def reserve(self, nbytes: int, consumer: str = "") -> Slot:
        """Take a slot that somebody else will fill for ``consumer``; to be lent, or freed."""
        with self._lock:
            return self._allocate(nbytes, consumer)

    def reserve_lease(self, nbytes: int, consumer: str) -> tuple[Slot, int]:
        """Take a slot and a lease for somebody who will lend it to ``consumer`` again and again."""
        with self._lock:
            slot = self._allocate(nbytes, consumer)
            return slot, self._lent.lend(None)

    def return_lease(self, slot: Slot, lease: int) -> None:
        """Take back what `reserve_lease` gave; in `spare`, and the server is done with it."""
        self._lent.recall(lease)
        self._arena.free(slot)

    def lend_all(self, kept: Sequence[object]) -> list[int]:
        """Lend slots, or other things that hold memory, under a lease each; all of them or none."""
        with self._lock:
            if self._lent.free < len(kept):
                self._lent.sweep()
            if self._lent.free < len(kept):
                raise _exhausted(len(self._lent))
            return [self._lent.lend(each) for each in kept]

    def recall(self, leases: Collection[int]) -> None:
        """End leases that the server was never told of."""
        with self._lock:
            for lease in leases:
                self._lent.recall(lease)

    def give_back(self, slot: Slot) -> None:
        """Take a slot back that was not lent."""
        with self._lock:
            self.free(slot)

    def free(self, slot: object) -> None:
        """Take a slot back that the server is done with; the model may still look at it."""
        if not isinstance(slot, Slot):
            # It goes back by itself with the last reference.
            return
        self._sent.discard(slot)
        if slot not in self._looks:
            self._arena.free(slot)

    def copy(self, memory: memoryview, payload: Any) -> None:
        """Copy a C-contiguous payload to memory elsewhere, and count it."""
        with self._lock:
            self._copied += payload.nbytes
        self._place(memory, [payload], 0, 0, NO_LEASE)

    def copied(self, memory: memoryview) -> memoryview:
        """Return a copy of borrowed memory that is the model's own, and count it."""
        with self._lock:
            self._copied += memory.nbytes
        return memoryview(bytearray(memory))

    def take_copied(self) -> int:
        """Return how many bytes of tensor data were copied since this was asked last."""
        with self._lock:
            copied, self._copied = self._copied, 0
        return copied

    def reclaim(self) -> bool:
        """Take back the slots that the server is done with; returns whether others are still lent."""
        with self._lock:
            if self._looked:
                self._collect()
            self._lent.sweep_oldest()
            if len(self._lent) > _MANY:
                self._lent.sweep()
            return bool(len(self._lent) or self._looks)

    def disown(self) -> None:
        """Place nothing from now on: for a forked child, whose slots are its parent's."""
        self.foreign = True
        self._lock = threading.Lock()

    def trim(self, idle_seconds: float) -> None:
        """Give memory back that was not used for some time."""
        with self._lock:
            self._collect()
            self._lent.sweep()
            self.spare()
            self._arena.trim(idle_seconds)

    def _collect(self) -> None:
        """Take back the slots that models do not look at any more."""
        # Not where the last look ends: that may be anywhere, also in here.
        while self._looked:
            slot = self._looked.popleft().slot
            del self._looks[slot]
            if slot not in self._sent:
                self._arena.free(slot)

    def _allocate(self, nbytes: int, consumer: str) -> Slot:
        if self.foreign:
            raise ChannelClosed("this process was forked from a stub: it has no output memory")
        if self._looked:
            self._collect()
        if self._lent.exhausted:
            self._lent.sweep()
            self.spare()
            if self._lent.exhausted:
                raise _exhausted(len(self._lent))
        try:
            return self._arena.allocate(nbytes, consumer)
        except BridgeError:
            self._lent.sweep()
            self.spare()
            return self._arena.allocate(nbytes, consumer)


def _nothing() -> None:
    """Give back nothing."""


def _exhausted(lent: int) -> BridgeError:
    return unavailable(
        f"all {lent} output slots are waiting to be sent; read answers faster or send fewer requests "
        "at once"
    )


def _place(
    memory: memoryview, payloads: Sequence[Any], region: int, offset: int, lease: int
) -> list[int]:
    """Do what the compiled module does faster."""
    fields: list[int] = []
    at = 0
    for payload in payloads:
        size = payload.nbytes
        if size > _LARGE:
            # NumPy copies without the GIL: the model's other threads go on.
            source = np.frombuffer(payload, np.uint8)
            np.copyto(np.frombuffer(memory, np.uint8, size, at), source)
        elif size:
            memory[at : at + size] = memoryview(payload).cast("B")
        fields += (region, offset + at, size, lease)
        at += (size + 63) & -_ALIGNMENT
    return fields
