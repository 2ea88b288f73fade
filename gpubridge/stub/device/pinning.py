"""Pinning of host memory for asynchronous copies, on a separate thread."""

from __future__ import annotations

import queue
import threading
from typing import Callable, Optional

from gpubridge.cuda_ipc import DeviceContext, PinnedMemory, relax_captures
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment

_Order = tuple[int, Optional[memoryview]]
_Range = tuple[Segment, int, int]


class HostPinning:
    """Pins and unpins ranges of host memory; no caller waits for either.

    A removed range stays mapped until it is unpinned. Copies also work with memory that is not pinned,
    but their caller waits. Nothing is pinned before `begin`.
    """

    def __init__(self, fall_back: Callable[[str, str], None]) -> None:
        self._fall_back = fall_back
        # Ranges added before `begin`, by region.
        self._early: dict[int, list[_Range]] | None = {}
        self._beginning = threading.Lock()
        # A region with a range to pin, or with None to unpin all of it; None ends the thread.
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        # Region ids are never reused.
        self._wanted: set[int] = set()
        self._reported = False
        self._thread: threading.Thread | None = None

    def begin(self, context: DeviceContext) -> None:
        """Pin all ranges added so far, and each one added later."""
        self._thread = threading.Thread(
            target=self._run, args=(PinnedMemory(context),), name="pinning", daemon=True
        )
        self._thread.start()
        with self._beginning:
            early, self._early = self._early or {}, None
            for ranges in early.values():
                for each in ranges:
                    self._order(each)

    def add(self, segment: Segment, offset: int, nbytes: int) -> None:
        """Queue a range of a segment for pinning.

        It is a slot, or slots for small tensors. Ranges do not overlap, and no copy crosses their ends.
        """
        added = segment, offset, nbytes
        with self._beginning:
            if self._early is not None:
                self._early.setdefault(segment.region, []).append(added)
            else:
                self._order(added)

    def _order(self, added: _Range) -> None:
        segment, offset, nbytes = added
        # The view of the segment may be released at any time.
        memory = segment.view[offset : offset + nbytes]
        segment.pinned = True
        self._wanted.add(segment.region)
        self._orders.put((segment.region, memory))

    def remove(self, region: int) -> None:
        """Queue a region for unpinning."""
        with self._beginning:
            if self._early is not None:
                self._early.pop(region, None)
            elif region in self._wanted:
                self._wanted.remove(region)
                self._orders.put((region, None))

    def close(self) -> None:
        """Unpin everything and wait for that; idempotent."""
        self._wanted.clear()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()

    def _run(self, pinned: PinnedMemory) -> None:
        relax_captures()
        ranges: dict[int, list[memoryview]] = {}
        while self._carry_out(self._orders.get(), pinned, ranges):
            pass

    def _carry_out(
        self, order: _Order | None, pinned: PinnedMemory, ranges: dict[int, list[memoryview]]
    ) -> bool:
        """Execute one queued order; return False for the last."""
        region, memory = order or (0, None)
        try:
            if memory is not None:
                if region in self._wanted:
                    ranges.setdefault(region, []).append(memory)
                    if not pinned.pin(memory):
                        self._report(pinned.reason)
            else:
                for each in (region,) if order else tuple(ranges):
                    for pinned_or_not in ranges.pop(each, ()):
                        pinned.unpin(pinned_or_not)
        except BridgeError as error:
            # After a lost context the process ends.
            self._report(error.message)
        return order is not None

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            self._fall_back(
                "host_memory_not_pinned",
                f"copies between host and GPU are not asynchronous: {reason}",
            )
