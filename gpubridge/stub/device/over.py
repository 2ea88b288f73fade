"""Deferred-free queue: device memory is reclaimed once every stream that used it has completed.

The copy stream is ordered behind those streams; when it has passed, the memory goes back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Callable, Optional

from gpubridge.cuda_ipc import CopyMark, CopyStream, CudaError, DeviceContext, DeviceSlot
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.tensor.streams import UsedStreams

Over = deque[tuple[object, UsedStreams, Optional[CopyMark]]]
"""Unreferenced memory, each with the streams that used it and the upload that filled it."""

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
        if error.sticky:
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

    Finalizers only add to it; `collect`, `waited` and `settle` are for one thread at a time.
    ``queued`` counts how often the bridge's stream was given something to do.
    """

    def __init__(self, stream: CopyStream, free: Callable[[DeviceSlot], None]) -> None:
        self._stream = stream
        self._free = free
        self._over: Over = deque()
        self._passing: deque[tuple[CopyMark, list[object]]] = deque()
        self.queued = self._passed = 0
        self._counting = threading.Lock()

    @property
    def left(self) -> bool:
        """Return whether streams may still use unreferenced memory."""
        return bool(self._passing or self._over)

    def hold(self, kept: object) -> DeviceHold:
        """Hold something for tensors; it is over with the last of them."""
        return DeviceHold(kept, self._over)

    def add(self, kept: object) -> None:
        """Let something go back when the copy stream has passed what it has to do now."""
        self._over.append((kept, {}, None))

    def begun(self) -> None:
        """Note that the stream has something to do: after it was told, while its memory is held."""
        with self._counting:
            self.queued += 1

    def collect(self) -> list[object]:
        """Return what is over, the copy stream being behind the streams that used it."""
        found: list[object] = []
        used: list[UsedStreams] = []
        while self._over:
            kept, streams, filled = self._over.popleft()
            found.append(kept)
            used.append(streams)
            if filled is not None and not filled.done():
                # That one, and not all that the stream of uploads has to do by now.
                filled.order_before(self._stream.handle)
                self.begun()
        # What was done there is in order already. The others live until this returns.
        for stream in set().union(*used) - {self._stream.handle}:
            follow(self._stream, stream)
            self.begun()
        return found

    def waited(self, over: list[object], queued: int) -> None:
        """Give back what was collected: the stream was waited for with all that it had to do."""
        self._passed = max(self._passed, queued)
        self._give_back(over)
        self._sweep()

    def settle(self) -> None:
        """Give back what no stream uses any more; nothing is waited for."""
        over = self.collect()
        if over and self._passed == self.queued:
            self._give_back(over)
        elif over:
            self._passing.append((self._stream.mark(), over))
            self._linger(over)
        self._sweep()

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

    def __init__(self, context: DeviceContext) -> None:
        self.stream = CopyStream(context)
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
