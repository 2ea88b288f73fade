"""Host memory made fit for asynchronous copies: pinned by a thread of its own, and once."""

from __future__ import annotations

import queue
import threading
from typing import Callable

from gpubridge.cuda_ipc import DeviceContext, PinnedMemory
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Segment


class HostPinning:
    """Pins ranges of host memory in the background: that takes about a second per GiB.

    Until it is done, and where it cannot be, copies work all the same, but their caller waits.
    """

    def __init__(self, context: DeviceContext, fall_back: Callable[[str, str], None]) -> None:
        self._pinned = PinnedMemory(context)
        self._fall_back = fall_back
        self._lock = threading.Lock()
        # By region, then by offset: the segment, and how many bytes from there on.
        self._wanted: dict[int, dict[int, tuple[Segment, int]]] = {}
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._said = False

    def add(self, region: int, segment: Segment, offset: int, nbytes: int) -> None:
        """Pin a range of a segment soon; ranges do not overlap, and no copy crosses their ends."""
        with self._lock:
            self._wanted.setdefault(region, {})[offset] = segment, nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pinning", daemon=True)
                self._thread.start()
        self._queue.put((region, offset))

    def remove(self, region: int) -> None:
        """A segment is about to be unmapped; no copy of it is under way."""
        with self._lock:
            for offset, (segment, nbytes) in self._wanted.pop(region, {}).items():
                self._pinned.unpin(segment.view[offset : offset + nbytes])

    def close(self) -> None:
        """Unpin everything."""
        with self._lock:
            self._wanted.clear()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        try:
            self._pinned.close()
        except BridgeError:
            # The context is lost, and goes with the process.
            pass

    def _run(self) -> None:
        while True:
            wanted = self._queue.get()
            if wanted is None:
                return
            region, offset = wanted
            with self._lock:
                found = self._wanted.get(region, {}).get(offset)
                if found is not None:
                    segment, nbytes = found
                    self._pin(segment.view[offset : offset + nbytes])

    def _pin(self, memory: memoryview) -> None:
        try:
            pinned = self._pinned.pin(memory)
            reason = self._pinned.reason
        except BridgeError as error:
            pinned, reason = False, error.message
        if not pinned and not self._said:
            self._said = True
            self._fall_back(
                "host_memory_not_pinned",
                f"copies between host and GPU are not asynchronous: {reason}",
            )
