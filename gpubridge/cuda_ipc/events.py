"""Events that order the streams of several processes: a fixed set, exported once, opened once by each.

The server creates them, as it allocates device memory, so that they outlive a recorder that others wait
for. An event stands for its last record, so it is *leased*: recorded again only after all consumers have
passed it. No event is created, exported or opened for a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Callable

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.copies import sleep_until
from gpubridge.cuda_ipc.driver import NOT_READY, call, handle_bytes, handle_from, status_of
from gpubridge.errors import InternalError, unavailable

_DISABLE_TIMING = 2
_INTERPROCESS = 4

LONGEST_EVENT_SECONDS = 600.0
"""For so long a thread waits for work of another process that lives; no kernel takes this long."""


def late_event(recorder: str, number: int) -> str:
    """Return the error text for an event that has not completed in `LONGEST_EVENT_SECONDS`."""
    return (
        f"expected the GPU work of {recorder} on tensors that it has handed on to be complete within "
        f"{LONGEST_EVENT_SECONDS:g} s, but event {number} is not: look for a kernel that hangs "
        "(nvidia-smi), and load that model again"
    )


class SharedEvents:
    """Events of one device that processes share, created (`create`) or opened (`open`).

    Any thread may use them. ``handles``: 64 bytes of each, for `open` in another process.
    """

    def __init__(self, context: DeviceContext) -> None:
        self._context = context
        self._events: list[Any] = []
        self.handles: tuple[bytes, ...] = ()

    @classmethod
    def create(cls, context: DeviceContext, count: int) -> SharedEvents:
        """Create events that others may open, in a context that outlives them; or raise CudaError."""
        made = cls(context)
        handles = []
        try:
            with context.pushed():
                for _ in range(count):
                    event = call("cuEventCreate", _DISABLE_TIMING | _INTERPROCESS)
                    made._events.append(event)
                    handles.append(handle_bytes(call("cuIpcGetEventHandle", event)))
        except BaseException:
            made.close()
            raise
        made.handles = tuple(handles)
        return made

    @classmethod
    def open(cls, context: DeviceContext, handles: Sequence[bytes]) -> SharedEvents:
        """Open another process's events, which must not close them first; or raise CudaError."""
        opened = cls(context)
        try:
            with context.pushed():
                for handle in handles:
                    ipc = handle_from("CUipcEventHandle", handle)
                    opened._events.append(call("cuIpcOpenEventHandle", ipc))
        except BaseException:
            opened.close()
            raise
        opened.handles = tuple(handles)
        return opened

    def record(self, number: int, stream: int) -> None:
        """Record an event behind the current work of a stream of this process; or raise CudaError.

        ``stream``: a handle; 0 or 1 is the legacy default stream, 2 the per-thread one.
        """
        event = self._event(number)
        with self._context.pushed():
            call("cuEventRecord", event, stream)

    def order(self, number: int, stream: int) -> None:
        """Order later work of a stream of this process after the event.

        The event has to stay leased until the stream has passed it.
        """
        event = self._event(number)
        with self._context.pushed():
            call("cuStreamWaitEvent", stream, event, 0)

    def done(self, number: int) -> bool:
        """Return whether the recorded work is complete, which a recorder that died leaves undone."""
        event = self._event(number)
        with self._context.pushed():
            return not status_of("cuEventQuery", event, expected=(NOT_READY,))

    def wait(self, number: int, recorder: str) -> None:
        """Wait, asleep, until the recorded work is complete.

        If the recorder has ended, this ends after another process has recorded the event again. Raises
        UNAVAILABLE after `LONGEST_EVENT_SECONDS`, with the name of the ``recorder``.
        """
        # The driver's own wait does not sleep for events of another process, and has no bound.
        with self._context.pushed():
            if not sleep_until(lambda: self.done(number), LONGEST_EVENT_SECONDS):
                raise unavailable(late_event(recorder, number))

    def close(self) -> None:
        """Destroy the events, for which no stream waits any more; idempotent."""
        events, self._events = self._events, []
        with self._context.pushed():
            for event in events:
                call("cuEventDestroy", event)

    def _event(self, number: int) -> Any:
        if not 0 <= number < len(self._events):
            raise InternalError(f"expected an event of {len(self._events)}, got {number}")
        return self._events[number]


class EventRing:
    """Leases events that only this process records; for any thread."""

    def __init__(self, events: SharedEvents) -> None:
        self._events = events
        # Reused in the order of their release.
        self._free = deque(range(len(events.handles)))

    def record(
        self, stream: int, reuse: Callable[[int], object] = lambda _: None
    ) -> EventLease | None:
        """Record an event on a stream; None when all are leased. A CudaError leases none.

        ``reuse`` is called with its number before the record.
        """
        try:
            number = self._free.popleft()
        except IndexError:
            return None
        lease = EventLease(number, self._free)
        reuse(number)
        self._events.record(number, stream)
        return lease

    def free(self) -> int:
        """Return the number of events that are not leased."""
        return len(self._free)


class EventLease:
    """A recorded event, by its ``number`` in the ring; released with this object."""

    __slots__ = ("__weakref__", "_free", "number")

    def __init__(self, number: int, free: deque[int]) -> None:
        self.number = number
        self._free = free

    def __del__(self) -> None:
        # A finalizer makes no call of the driver.
        self._free.append(self.number)
