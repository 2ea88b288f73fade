"""Device memory that a stub has open: each region once, until it is no longer used.

A separate thread opens and closes one region after the other: either may take milliseconds, and closing
waits for all work of the process on the device. The first use of a region waits until it is open.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Callable

from gpubridge.cuda_ipc import CudaError, DeviceContext, DeviceSegment, DriverThread, SharedEvents
from gpubridge.cuda_ipc.driver import HANDLE_BYTES
from gpubridge.errors import BridgeError, InternalError
from gpubridge.transport.channel import close_all
from gpubridge.transport.device_events import arena_region, reserve_addresses

_PRIVATE = 1 << 29
"""Part of a private region's id, above the numbers that the server assigns."""


class _OpenMemory:
    """Memory that the driver has open, used by a region and by its predecessor of the same id."""

    __slots__ = ("events", "segment", "users")

    def __init__(self, segment: DeviceSegment, events: SharedEvents | None) -> None:
        self.segment = segment
        self.events = events
        self.users = 0


class _State:
    """State of a region that outlives it, until it is closed and the server is told."""

    __slots__ = ("announcements", "fds", "fields", "memory")

    def __init__(self, fields: dict[str, Any], fds: list[int]) -> None:
        self.fields = fields
        self.fds = fds
        self.announcements = 0
        self.memory: _OpenMemory | None = None


class _OpenAttempt:
    """One attempt to open a region."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BridgeError | None = None


class _Closer:
    """Closes a region with its last reference, after it can no longer be looked up."""

    __slots__ = ("_close", "_state")

    def __init__(self, close: Callable[[_State], None], state: _State) -> None:
        self._close = close
        self._state = state

    def __del__(self) -> None:
        self._close(self._state)


class OpenedRegion:
    """Device memory that this process has open or will open; closed with its last reference.

    ``view`` represents it in lease books; ``client``: whether it is a client's region.
    """

    def __init__(
        self,
        state: _State,
        end: _Closer,
        begin: Callable[[_State], _OpenAttempt],
    ) -> None:
        fields = state.fields
        self.region: int = fields["region"]
        self.size: int = fields["size"]
        self.client: bool = fields["client"]
        self.view = reserve_addresses(self.size)
        self.state = state
        self._end = end
        self._begin = begin
        self._attempt = None if state.memory is not None else begin(state)

    def opened(self) -> _OpenMemory:
        """Wait until it is open; after a BridgeError the next caller tries again."""
        memory = self.state.memory
        while memory is None:
            attempt = self._attempt
            if attempt is None:
                attempt = self._attempt = self._begin(self.state)
            attempt.done.wait()
            if attempt.error is not None:
                self._attempt = None
                try:
                    raise attempt.error
                finally:
                    # Else the error's own frame would keep it, and this region.
                    del attempt
            memory = self.state.memory
        return memory

    @property
    def segment(self) -> DeviceSegment:
        """The memory; waits and raises as `opened`."""
        return self.opened().segment

    @property
    def pointer(self) -> int:
        """Its device address in this process; waits and raises as `opened`."""
        return self.opened().segment.pointer

    @property
    def events(self) -> SharedEvents | None:
        """The events of the process that writes to it; waits and raises as `opened`."""
        return self.opened().events


class DeviceRegions:
    """The regions that this process has open.

    - ``context``: returns the device's context, which is created on first use.
    - ``owner``: the upper half of the ids of private regions.
    - ``notify_closed``: tells the server that a region was closed, and how many announcements of it
      were received before.
    - ``no_events``: the reason why events are not shared between processes; empty if they are.
    """

    def __init__(
        self,
        context: Callable[[], DeviceContext],
        owner: int,
        notify_closed: Callable[[int, int], None],
    ) -> None:
        self._context = context
        self._owner = owner
        self._notify_closed = notify_closed
        self._announcing = threading.Lock()
        self._thread: DriverThread | None = None
        self._known: weakref.WeakValueDictionary[int, OpenedRegion] = weakref.WeakValueDictionary()
        # Used by the thread only.
        self._open: dict[int, _OpenMemory] = {}
        self._private = 0
        self.no_events = ""

    def announce(self, fields: dict[str, Any], fds: list[int]) -> OpenedRegion:
        """Start to open a region that the server announces, unless it is open; takes the descriptors."""
        with self._announcing:
            opened = self._known.get(fields["region"])
            if opened is None:
                opened = self._add(_State(fields, fds))
            else:
                close_all(fds)
            opened.state.announcements += 1
        return opened

    def make_private(self, nbytes: int) -> OpenedRegion:
        """Allocate memory that no other process can open."""
        region = arena_region(self._owner) + _PRIVATE + self._private
        self._private += 1
        segment = DeviceSegment.private(self._context(), region, nbytes)
        state = _State({"region": region, "size": segment.size, "client": False}, [])
        state.memory = _OpenMemory(segment, None)
        state.memory.users = 1
        with self._announcing:
            return self._add(state)

    def _add(self, state: _State) -> OpenedRegion:
        if self._thread is None:
            self._thread = DriverThread()
        thread = self._thread
        end = _Closer(lambda state: thread.submit(partial(self._close, state)), state)
        opened = OpenedRegion(state, end, self._begin)
        self._known[opened.region] = opened
        return opened

    def __len__(self) -> int:
        return len(self._known)

    def get(self, region: int) -> OpenedRegion | None:
        """Return an open region on the device; None for one in host memory, or a closed one."""
        return self._known.get(region)

    def wait_for(self, regions: Iterable[int]) -> None:
        """Wait until those regions that are on the device are open; raises as `OpenedRegion.opened`."""
        for region in regions:
            opened = self._known.get(region)
            if opened is not None:
                opened.opened()

    def finish(self) -> None:
        """Wait until unused regions are closed and the server is told."""
        if self._thread is not None:
            self._thread.finish()

    def close(self) -> None:
        """Stop the thread: no region is opened or closed any more, before the process ends."""
        if self._thread is not None:
            self._thread.close()

    def _begin(self, state: _State) -> _OpenAttempt:
        """Queue a region for opening."""
        attempt = _OpenAttempt()
        assert self._thread is not None
        self._thread.submit(partial(self._attempt_open, state, attempt))
        return attempt

    def _attempt_open(self, state: _State, attempt: _OpenAttempt) -> None:
        try:
            if state.memory is None:
                region = state.fields["region"]
                # A predecessor may not be closed yet, and the driver opens nothing twice.
                memory = self._open.get(region)
                if memory is None:
                    memory = self._open[region] = self._opened(state)
                memory.users += 1
                state.memory = memory
        except BridgeError as error:
            # Its frames would keep the region.
            attempt.error = error.with_traceback(None)
        except Exception as error:
            attempt.error = InternalError(f"device memory is not opened: {error!r}")
            raise
        finally:
            attempt.done.set()

    def _opened(self, state: _State) -> _OpenMemory:
        """Open memory, by its descriptor if it has one, and its events."""
        fields, fds = state.fields, state.fds
        region, size = fields["region"], fields["size"]
        context = self._context()
        if fds:
            segment = DeviceSegment.open_fd(context, region, fds[0], size)
        else:
            segment = DeviceSegment.open(context, region, bytes.fromhex(fields["handle"]), size)
        close_all(fds)
        fds.clear()
        return _OpenMemory(segment, self._events_of(fields))

    def _events_of(self, fields: dict[str, Any]) -> SharedEvents | None:
        self.no_events = fields.get("no_events") or self.no_events
        raw = bytes.fromhex(fields["events"])
        if not raw:
            return None
        handles = [raw[at : at + HANDLE_BYTES] for at in range(0, len(raw), HANDLE_BYTES)]
        try:
            return SharedEvents.open(self._context(), handles)
        except CudaError as error:
            self.no_events = error.message
            return None

    def _close(self, state: _State) -> None:
        close_all(state.fds)
        memory, region = state.memory, state.fields["region"]
        if memory is not None:
            memory.users -= 1
            if not memory.users:
                self._open.pop(region, None)
                try:
                    if memory.events is not None:
                        memory.events.close()
                    memory.segment.close()
                except BridgeError:
                    # The memory stays open until the process ends: the server must not free it before.
                    return
        if state.announcements:
            self._notify_closed(region, state.announcements)
