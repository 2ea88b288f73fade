"""Deferred-free queue: device memory is reclaimed once every stream that used it has completed.

A stream of its own is ordered behind those streams; when it has passed, the memory goes back.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence, Set as AbstractSet
from typing import Callable, Optional

from gpubridge.cuda_ipc import CopyMark, CopyStream, CudaError, DeviceSlot
from gpubridge.cuda_ipc.driver import CAPTURES
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.tensor.streams import UsedStreams

Over = deque[tuple[object, UsedStreams, Optional[CopyMark]]]
"""Unreferenced memory, each with the streams that used it and where copies of it end."""

_LOOKS = 50


class DeviceHold:
    """Holds what goes back (``kept``) for tensors: a slot of the arena, or memory that is lent.

    ``streams`` may use the memory; ``filled`` is where an upload into it ends.
    """

    __slots__ = ("__weakref__", "_over", "filled", "kept", "streams")

    def __init__(self, kept: object, over: Over) -> None:
        self.kept = kept
        self.streams: UsedStreams = {}
        self.filled: CopyMark | None = None
        self._over = over

    def __del__(self) -> None:
        self._over.append((self.kept, self.streams, self.filled))


def follow(copies: CopyStream, stream: int) -> None:
    """Let what follows on the bridge's stream wait for all that a model's has to do now."""
    try:
        copies.order_after(stream)
    except CudaError as error:
        if error.sticky or error.status in CAPTURES:
            raise
        # What it had to do can only be waited for.
        copies.wait_for_all()


def precede(copies: CopyStream, stream: int) -> None:
    """Let what follows on a model's stream wait for all that the bridge's has to do now."""
    try:
        copies.order_before(stream)
    except CudaError as error:
        # Nothing follows on it any more.
        if error.sticky:
            raise


class OverMemory:
    """Gives back what is over: slots to the arena, by ``free``, all else by letting go of it.

    Finalizers only add to it; `collect`, `passed` and `settle` are for one thread at a time, and
    what raises CudaError there keeps what is over for later. ``stream`` has nothing else to do than
    to come after those that used the memory.
    """

    def __init__(self, stream: CopyStream, free: Callable[[DeviceSlot], None]) -> None:
        self.stream = stream
        self._free = free
        self._over: Over = deque()
        # What ``stream`` is behind already, and what is marked there, too.
        self._behind: list[object] = []
        self._passing: deque[tuple[CopyMark, list[object]]] = deque()

    @property
    def left(self) -> bool:
        """Return whether streams may still use unreferenced memory."""
        return bool(self._passing or self._behind or self._over)

    def hold(self, kept: object) -> DeviceHold:
        """Hold something for tensors; it is over with the last of them."""
        return DeviceHold(kept, self._over)

    def add(self, kept: object, mark: CopyMark) -> None:
        """Let something go back when a mark has passed."""
        self._over.append((kept, {}, mark))

    def settle(self) -> None:
        """Give back what no stream uses any more; nothing is waited for."""
        self._sweep()
        self._behind += self.collect(self.stream)
        if self._behind:
            self._passing.append((self.stream.mark(), self._behind))
            over, self._behind = self._behind, []
            self._linger(over)
            self._sweep()

    def collect(self, stream: CopyStream, behind: AbstractSet[int] | None = None) -> list[object]:
        """Return what is over and may be in use, a stream having been ordered behind that.

        Unused memory goes back at once. ``behind``: what other streams than these may use stays,
        and so does what streams use on which graphs are captured now.
        """
        found: Over = deque()
        left: Over = deque()
        try:
            captured = functools.cache(self.stream.captured)
            while self._over:
                kept, streams, filled = each = self._over[0]
                filling = filled is not None and not filled.done()
                busy = any(map(captured, streams))
                self._over.popleft()
                if not filling and not streams:
                    # What this was the last to hold is over, too.
                    self._give_back([kept])
                    del kept, each
                    continue
                beyond = behind is not None and (filling or not streams.keys() <= behind)
                if beyond or busy:
                    left.append(each)
                    continue
                found.append(each)
                if filled is not None and filling:
                    filled.order_before(stream.handle)
            # They live until this returns.
            for used in set().union(*(streams for _, streams, _ in found)):
                follow(stream, used)
        except BaseException:
            left += found
            raise
        finally:
            self._over.extendleft(reversed(left))
        return [kept for kept, _, _ in found]

    def passed(self, over: list[object]) -> None:
        """Give back what was collected: the stream was waited for."""
        self._give_back(over)
        self.settle()

    def _linger(self, over: list[object]) -> None:
        """Look some times whether streams have passed: a client may unregister its memory at once."""
        if not any(type(kept) is tuple and kept[1].client for kept in over):
            return
        for _ in range(_LOOKS):
            if self._passing[-1][0].done():
                return

    def _sweep(self) -> None:
        while self._passing and self._passing[0][0].done():
            self._give_back(self._passing.popleft()[1])

    def _give_back(self, over: list[object]) -> None:
        for kept in over:
            if isinstance(kept, DeviceSlot):
                self._free(kept)
        # Leases and regions go with the last reference.
        over.clear()


class Uploads:
    """Begins uploads on a stream of their own; holds the host memory that they read until the end.

    Each request's are waited for by a mark of its own, never by all that the stream has to do: that
    may be the next request's by then.
    """

    def __init__(self, stream: CopyStream) -> None:
        self.stream = stream
        # What is read, in the stream's order.
        self._under_way: deque[tuple[CopyMark, list[memoryview]]] = deque()

    def begin(self, copies: Sequence[tuple[memoryview, DeviceBytes]]) -> None:
        """Begin to copy the inputs of one request to the arena; `ready` tells when all are there.

        No slot goes back, nor its memory on the host, before that; neither when this raises
        CudaError.
        """
        try:
            for memory, data in copies:
                self.stream.h2d(data.pointer, memory, memory.nbytes)
        finally:
            mark = self._mark()
            if mark is not None:
                self._under_way.append((mark, [memory for memory, _ in copies]))
                for _, data in copies:
                    data.ready = mark
                    if isinstance(data.owner, DeviceHold):
                        data.owner.filled = mark

    def _mark(self) -> CopyMark | None:
        """Mark what was begun; None where that is done, since no mark could be made."""
        try:
            return self.stream.mark()
        except CudaError:
            self.stream.wait()
            return None

    @property
    def busy(self) -> bool:
        """Return whether uploads may still read host memory."""
        return bool(self._under_way)

    def sweep(self) -> None:
        """Let go of the host memory that was read; one thread at a time. May raise CudaError."""
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()

    def close(self) -> None:
        """Wait until no host memory is read any more."""
        try:
            self.stream.close()
        except CudaError:
            # The context is lost, and goes with the process.
            pass
        self._under_way.clear()
