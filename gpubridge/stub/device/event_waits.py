"""Waits of this stub's streams for events of other stubs, shown to the server.

When a stub dies before its work is complete, the server releases the streams that wait for that. Where a driver
does not heed it, streams here would wait for ever; only a stub can tell that from a model that takes
long. So each wait lies between two marks of its stream: it lasts while the first is passed and the second
is not. A thread looks at them now and then, as the model's may wait for the GPU itself.
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

_LOOK_SECONDS = 1.0
_Wait = tuple[int, Optional[CopyMark], Optional[CopyMark]]
"""An event, what comes before the wait for it, and its end; None for a thread's own wait."""


class EventWaits:
    """The waits of this process for events of others.

    ``cells``: where the server sees them, by their `gpubridge.transport.device_events.event_name`.
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
        """Let what follows on a stream wait for an event; ``copies`` is of the same device."""
        before = copies.mark(stream)
        events.order(number, stream)
        self._begin((name, before, copies.mark(stream)))

    @contextlib.contextmanager
    def by_thread(self, name: int) -> Iterator[None]:
        """Show that a thread waits for an event meanwhile."""
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
        """Forget the oldest waits that are over; may raise CudaError."""
        if not self._waits:
            return
        with self._lock:
            while self._waits and _is_over(self._waits[0]):
                self._waits.popleft()
            if not self._waits:
                self._cells.awaited[0] = 0

    def _watch(self) -> None:
        while self._begun.wait():
            time.sleep(_LOOK_SECONDS)
            try:
                self.look()
            except BridgeError:
                # The device is lost, and the process ends.
                return

    def look(self) -> None:
        """Show which events are waited for now; may raise CudaError."""
        awaited = self._cells.awaited
        with self._lock:
            self._waits = deque(wait for wait in self._waits if not _is_over(wait))
            shown = list({wait[0] for wait in self._waits if _is_reached(wait)})
            for at in range(1, len(awaited)):
                awaited[at] = shown[at - 1] if at <= len(shown) else 0
            awaited[0] = time.monotonic_ns() if self._waits else 0
            if not self._waits:
                self._begun.clear()


def _is_reached(wait: _Wait) -> bool:
    return wait[1] is None or wait[1].done()


def _is_over(wait: _Wait) -> bool:
    return wait[2] is not None and wait[2].done()
