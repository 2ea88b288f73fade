"""Output memory of a stub: slots that are lent to the server until it has sent them."""

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
"""This fraction of the memory is reserved for small outputs: unread large ones may fill the rest."""


class _ModelArray(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a model's array over a slot; all arrays derived from it keep it alive."""

    __slots__ = ("slot",)
    slot: Slot


class OutputMemory:
    """Copies the tensors of a response to one slot, and reclaims slots once they are sent.

    Any thread may use it.

    - ``table``: the lease bytes that the server clears when it is done with a slot.
    - ``on_create``, ``on_drop``: called for new and dropped regions, before the server gets references
      to them.
    - ``forked``: whether this is a forked child, which does not own the memory.
    - ``exposed``: whether a model has ever got a slot to write to.
    - ``pool``: lends slots again and again in compiled code, which other compiled objects use; None without
      the module.
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
        self.forked = False
        compiled = native()
        self._place = _place if compiled is None else compiled.place
        self._arena = HostArena(owner, limit, on_create, on_drop, limit // _KEPT)
        self._lent = LentSlots(table, self.free)
        # Slots that a model has arrays of, and those of them that are lent to the server.
        self._model_arrays: dict[Slot, _ModelArray] = {}
        self._sent: set[Slot] = set()
        self._deleted_arrays: deque[_ModelArray] = deque()
        self.exposed = False
        self.pool = None if compiled is None else compiled.OutputPool(self, table)

    def place(self, payloads: Sequence[Any], consumer: str = "") -> list[int]:
        """Copy C-contiguous payloads to a slot; returns the fields of their references.

        ``consumer``: the model or ensemble whose processes map the memory, which holds nothing else;
        empty for the server alone.

        Raises BridgeError: UNAVAILABLE when the output memory is full, as all methods that allocate.
        """
        total = copied = 0
        for payload in payloads:
            size = payload.nbytes
            copied += size
            total += (size + 63) & -_ALIGNMENT
        if total == 0:
            return [0, 0, 0, NO_LEASE] * len(payloads)
        slot, lease = self.lend(total, consumer)
        with self._lock:
            self._copied += copied
        return self._place(slot.memory, payloads, slot.segment.region, slot.offset, lease)

    def allocate_for_model(self, nbytes: int, consumer: str = "") -> tuple[Slot, NDArray[np.uint8]]:
        """Allocate a slot that the model fills with an output for ``consumer``; returns slot and bytes.

        It is freed once no array refers to it and, if it was sent, the server is done with it.
        """
        with self._lock:
            self.exposed = True
            slot = self._allocate(max(nbytes, 1), consumer)
            memory = np.frombuffer(slot.memory, np.uint8)
            array = self._model_arrays[slot] = _ModelArray(memory, self._deleted_arrays.append)
            array.slot = slot
        return slot, memory[:nbytes]

    def send(self, slot: Slot, nbytes: int) -> tuple[int, int, int, int] | None:
        """Lend the server a slot that a model has filled; None if it is lent already."""
        with self._lock:
            if self.forked or not nbytes or slot in self._sent or self._lent.exhausted:
                return None
            self._sent.add(slot)
            return slot.segment.region, slot.offset, nbytes, self._lent.lend(slot)

    def reserve(self, nbytes: int, consumer: str = "") -> Slot:
        """Allocate a slot for ``consumer`` that the caller fills, and lends or frees."""
        with self._lock:
            return self._allocate(nbytes, consumer)

    def lend(self, nbytes: int, consumer: str = "") -> tuple[Slot, int]:
        """Allocate a slot and lend it to ``consumer`` once, which the caller fills; returns its lease."""
        with self._lock:
            # A model that sends from a thread of its own ends no batch, which reclaims slots, too.
            self._lent.sweep_oldest()
            slot = self._allocate(nbytes, consumer)
            return slot, self._lent.lend(slot)

    def reserve_lease(self, nbytes: int, consumer: str) -> tuple[Slot, int]:
        """Allocate a slot and a lease that the caller lends to ``consumer`` repeatedly."""
        with self._lock:
            slot = self._allocate(nbytes, consumer)
            return slot, self._lent.lend(None)

    def return_lease(self, slot: Slot, lease: int) -> None:
        """Free a slot and lease of `reserve_lease` that the server is done with."""
        self._lent.recall(lease)
        self._arena.free(slot)

    def lend_all(self, kept: Sequence[object]) -> list[int]:
        """Lend slots, or other objects that keep memory, each under a lease; all of them or none."""
        with self._lock:
            if self._lent.free < len(kept):
                self._lent.sweep()
            if self._lent.free < len(kept):
                raise _exhausted(len(self._lent))
            return [self._lent.lend(each) for each in kept]

    def recall(self, leases: Collection[int]) -> None:
        """End leases that the server has not seen."""
        with self._lock:
            for lease in leases:
                self._lent.recall(lease)

    def give_back(self, slot: Slot) -> None:
        """Free a slot that was not lent."""
        with self._lock:
            self.free(slot)

    def free(self, slot: object) -> None:
        """Free a slot that the server is done with, unless the model still has arrays of it."""
        if not isinstance(slot, Slot):
            # Other objects free their memory when they are deleted.
            return
        self._sent.discard(slot)
        if slot not in self._model_arrays:
            self._arena.free(slot)

    def copy(self, memory: memoryview, payload: Any) -> None:
        """Copy a C-contiguous payload to other memory, and count the bytes."""
        with self._lock:
            self._copied += payload.nbytes
        self._place(memory, [payload], 0, 0, NO_LEASE)

    def copied(self, memory: memoryview) -> memoryview:
        """Return a private copy of borrowed memory, and count the bytes."""
        with self._lock:
            self._copied += memory.nbytes
        return memoryview(bytearray(memory))

    def take_copied(self) -> int:
        """Return the bytes of tensor data copied since the last call."""
        with self._lock:
            copied, self._copied = self._copied, 0
        return copied if self.pool is None else copied + self.pool.take_copied()

    def reclaim(self) -> bool:
        """Free the slots that the server is done with; returns whether others are still in use."""
        with self._lock:
            if self._deleted_arrays:
                self._collect()
            self._lent.sweep_oldest()
            if len(self._lent) > _MANY:
                self._lent.sweep()
            return bool(len(self._lent) or self._model_arrays)

    def disown(self) -> None:
        """Refuse allocations from now on: for a forked child, whose parent owns the slots."""
        self.forked = True
        self._lock = threading.Lock()
        if self.pool is not None:
            self.pool.disown()

    def trim(self, idle_seconds: float) -> None:
        """Release segments that were idle for some time."""
        with self._lock:
            self._collect()
            self._lent.sweep()
            self._release_unused()
            self._arena.trim(idle_seconds)

    def _collect(self) -> None:
        """Free the slots whose arrays are all deleted."""
        # Not in the weak reference's callback, which may run anywhere, even in here.
        while self._deleted_arrays:
            slot = self._deleted_arrays.popleft().slot
            del self._model_arrays[slot]
            if slot not in self._sent:
                self._arena.free(slot)

    def _release_unused(self) -> None:
        if self.pool is not None:
            self.pool.give_back()

    def _allocate(self, nbytes: int, consumer: str) -> Slot:
        if self.forked:
            raise ChannelClosed("this process was forked from a stub: it has no output memory")
        if self._deleted_arrays:
            self._collect()
        if self._lent.exhausted:
            self._lent.sweep()
            self._release_unused()
            if self._lent.exhausted:
                raise _exhausted(len(self._lent))
        if nbytes > _LARGE and not self._arena.has_free(nbytes, consumer):
            # What the server is done with is used again before memory is taken.
            self._lent.sweep()
        try:
            return self._arena.allocate(nbytes, consumer)
        except BridgeError:
            self._lent.sweep()
            self._release_unused()
            return self._arena.allocate(nbytes, consumer)


def _exhausted(lent: int) -> BridgeError:
    return unavailable(
        f"all {lent} output slots are waiting to be sent; read answers faster or send fewer requests "
        "at once"
    )


def _place(
    memory: memoryview, payloads: Sequence[Any], region: int, offset: int, lease: int
) -> list[int]:
    """Copy payloads one after another; as the compiled `place`."""
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
