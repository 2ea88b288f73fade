"""Waits of this stub's streams for events of other stubs, published to the server.

When a stub dies before its work is complete, the server releases the streams that wait for it. With some
drivers those streams wait for ever; only the waiting stub can tell that from a model that takes long. So
each wait is enclosed by two marks of its stream, and lasts while the first is passed and the second is
not. A thread polls the marks, since the model's thread may wait for the GPU itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

from gpubridge.cuda_ipc import CopyMark, CopyStream, SharedEvents
from gpubridge.errors import BridgeError

if TYPE_CHECKING:
    from gpubridge.transport.control import EventCells

_POLL_SECONDS = 1.0
_Wait = tuple[int, Optional[CopyMark], Optional[CopyMark]]
"""An event, and the marks before and after the wait for it; None for the wait of a thread."""


class EventWaits:
    """The waits of this process for events of other processes.

    ``cells``: shared with the server; events are named by `gpubridge.transport.device_events.event_name`.
    """

    def __init__(self, cells: EventCells) -> None:
        self._cells = cells
        self._waits: deque[_Wait] = deque()
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def order(
        self, name: int, events: SharedEvents, number: int, stream: int, copies: CopyStream
    ) -> None:
        """Order later work of a stream after an event; ``copies`` is of the same device."""
        before = copies.mark(stream)
        events.order(number, stream)
        self._begin((name, before, copies.mark(stream)))

    @contextlib.contextmanager
    def by_thread(self, name: int) -> Iterator[None]:
        """Publish that a thread waits for an event inside this context."""
        wait = name, None, None
        self._begin(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(wait)

    def _begin(self, wait: _Wait) -> None:
        with self._lock:
            if not self._waits:
                self._cells.awaited[0] = time.monotonic_ns()
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="waits", daemon=True)
                self._thread.start()
        self._begun.set()

    def sweep(self) -> None:
        """Drop the oldest waits that have ended; may raise CudaError."""
        if not self._waits:
            return
        with self._lock:
            while self._waits and _has_ended(self._waits[0]):
                self._waits.popleft()
            if not self._waits:
                self._cells.awaited[0] = 0

    def _watch(self) -> None:
        while self._begun.wait():
            time.sleep(_POLL_SECONDS)
            try:
                self.look()
            except BridgeError:
                # The device is lost, and the process ends.
                return

    def look(self) -> None:
        """Publish the events that are waited for now; may raise CudaError."""
        awaited = self._cells.awaited
        with self._lock:
            self._waits = deque(wait for wait in self._waits if not _has_ended(wait))
            shown = list({wait[0] for wait in self._waits if _is_reached(wait)})
            for at in range(1, len(awaited)):
                awaited[at] = shown[at - 1] if at <= len(shown) else 0
            awaited[0] = time.monotonic_ns() if self._waits else 0
            if not self._waits:
                self._begun.clear()


def _is_reached(wait: _Wait) -> bool:
    return wait[1] is None or wait[1].done()


def _has_ended(wait: _Wait) -> bool:
    return wait[2] is not None and wait[2].done()
