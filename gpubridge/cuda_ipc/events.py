"""Events that order the streams of two processes: a fixed set of the producer's, exported once.

An event means what was recorded last, so it is *leased*: recorded again only after the consumer has
said that it needs it no more. Nothing is made, exported or opened for a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import NOT_READY, call, handle_bytes, handle_from, status_of
from gpubridge.errors import InternalError

__all__ = ["EventRing", "ImportedEvents"]

_DISABLE_TIMING = 2
_INTERPROCESS = 4


class EventRing:
    """The events of one producer.

    Any thread may record, and any thread or finalizer may release.

    Parameters
    ----------
    context : DeviceContext
        Of the device whose streams they are recorded on; has to outlive them.
    count : int
        How many may be leased at a time.

    Raises
    ------
    CudaError
        Events do not cross processes here; nothing is left behind.

    Attributes
    ----------
    handles : tuple of bytes
        64 bytes of each event, in the order of their indices, for `ImportedEvents`.
    """

    def __init__(self, context: DeviceContext, count: int) -> None:
        self._context = context
        self._events: list[Any] = []
        self._leased = [False] * count
        handles = []
        try:
            with context.pushed():
                for _ in range(count):
                    event = call("cuEventCreate", _DISABLE_TIMING | _INTERPROCESS)
                    self._events.append(event)
                    handles.append(handle_bytes(call("cuIpcGetEventHandle", event)))
        except BaseException:
            self.close()
            raise
        self.handles = tuple(handles)
        # The one released longest ago is recorded next.
        self._free = deque(range(count))

    def record(self, stream: int) -> int | None:
        """Record an event on a stream of this process and lease it.

        Parameters
        ----------
        stream : int
            A handle; 0 or 1 the legacy default stream, 2 the per-thread one.

        Returns
        -------
        int or None
            The event's index; None when all are leased, so that the producer has to wait itself.

        Raises
        ------
        CudaError
            It cannot be recorded; it is not leased then.
        """
        if not self._events:
            raise InternalError("these events are closed")
        try:
            index = self._free.popleft()
        except IndexError:
            return None
        try:
            with self._context.pushed():
                call("cuEventRecord", self._events[index], stream)
        except BaseException:
            self._free.append(index)
            raise
        self._leased[index] = True
        return index

    def release(self, index: int) -> None:
        """Take an event back: nobody will wait for what it means any more.

        Raises
        ------
        InternalError
            It is not leased.
        """
        if not 0 <= index < len(self._leased) or not self._leased[index]:
            raise InternalError(f"event {index} of {len(self._leased)} is not leased")
        self._leased[index] = False
        self._free.append(index)

    def leased(self) -> int:
        """How many are leased now."""
        return sum(self._leased)

    def close(self) -> None:
        """Give the events back, whoever still waits for them; idempotent."""
        events, self._events = self._events, []
        with self._context.pushed():
            for event in events:
                call("cuEventDestroy", event)


class ImportedEvents:
    """The events of another process's ring, opened once.

    Parameters
    ----------
    context : DeviceContext
        Of the same device; has to outlive them.
    handles : sequence of bytes
        `EventRing.handles`.

    Raises
    ------
    CudaError
        They cannot be opened: this process's own, gone, or events do not cross processes here.
    """

    def __init__(self, context: DeviceContext, handles: Sequence[bytes]) -> None:
        self._context = context
        self._events: list[Any] = []
        try:
            with context.pushed():
                for handle in handles:
                    ipc = handle_from("CUipcEventHandle", handle)
                    self._events.append(call("cuIpcOpenEventHandle", ipc))
        except BaseException:
            self.close()
            raise

    def order(self, index: int, stream: int) -> None:
        """Let what follows on a stream of this process wait for the event.

        Waits on the device only. The event has to stay leased until the stream has passed it.

        Raises
        ------
        InternalError
            There is no such event.
        """
        event = self._event(index)
        with self._context.pushed():
            call("cuStreamWaitEvent", stream, event, 0)

    def done(self, index: int) -> bool:
        """Whether what the event means is done; it never is when its process died before."""
        event = self._event(index)
        with self._context.pushed():
            return not status_of("cuEventQuery", event, expected=(NOT_READY,))

    def complete(self, stream: int) -> None:
        """Record every event on an idle stream of this process, for a producer that has died.

        What it had recorded never comes to pass by itself, and streams that wait for it would wait
        for ever; afterwards they go on, with undefined data.
        """
        with self._context.pushed():
            for event in self._events:
                call("cuEventRecord", event, stream)

    def close(self) -> None:
        """Close the events; idempotent."""
        events, self._events = self._events, []
        with self._context.pushed():
            for event in events:
                call("cuEventDestroy", event)

    def _event(self, index: int) -> Any:
        if not 0 <= index < len(self._events):
            raise InternalError(f"expected an event of {len(self._events)}, got {index}")
        return self._events[index]
