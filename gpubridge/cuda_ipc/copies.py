"""Copies on a stream of their own, and the order between it and the streams of others.

Nothing here waits but what is called so, and what waits does so without the interpreter's lock and is
counted. A stream that is captured does nothing: no event is recorded on it, nor made to wait there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CAPTURES, NOT_READY, CudaError, call, status_of
from gpubridge.cuda_ipc.pinned import copied_pieces
from gpubridge.cuda_ipc.waiting import sleep_until, soon
from gpubridge.errors import BridgeError, ErrorCode, InternalError

_NON_BLOCKING = 1
_BLOCKING_SYNC = 1
_DISABLE_TIMING = 2
_CAPTURE_SECONDS = 10.0
_LOOK = 0.001


class CopyCounts:
    """Work of streams so far: change it while ``lock`` is held.

    - ``copied``, ``copies``: bytes and number of the copies by kind: ``h2d``, ``d2h``, ``d2d``, ``p2p``.
    - ``waits``: how often somebody has waited for it.
    """

    __slots__ = ("copied", "copies", "lock", "waits")

    def __init__(self) -> None:
        self.copied = {"h2d": 0, "d2h": 0, "d2d": 0, "p2p": 0}
        self.copies = dict.fromkeys(self.copied, 0)
        self.waits = 0
        # Reentrant: a finalizer that runs in between may copy, too.
        self.lock = threading.RLock()


class CopyStream:
    """One stream that does not wait for the legacy default stream, nor that for it.

    Any thread may use it, whichever device is current there; its context has to outlive it.

    - ``handle``: the driver's ``CUstream``.
    - ``counts``: of its work; may be those of other streams, too.
    """

    def __init__(self, context: DeviceContext, counts: CopyCounts | None = None) -> None:
        self.counts = CopyCounts() if counts is None else counts
        self._context = context
        self._events: list[Any] = []
        self._free_events: deque[Any] = deque()
        with context.pushed():
            self._stream = call("cuStreamCreate", _NON_BLOCKING)
        self.handle = int(self._stream)

    def h2d(self, pointer: int, memory: memoryview, nbytes: int) -> None:
        """Copy from the host to the device.

        Pinned memory must stay as it is until the copy is done (`mark`, `wait`); of other memory the
        driver takes a copy first.
        """
        _check(memory, nbytes)
        pieces = copied_pieces(memory, nbytes)
        copies = [(pointer + at, piece, size) for at, piece, size in pieces]
        self._copy("h2d", "cuMemcpyHtoDAsync", copies, nbytes)

    def d2h(self, memory: memoryview, pointer: int, nbytes: int) -> None:
        """Copy from the device to the host; into memory that is not pinned it waits.

        The memory has to be there until the copy is done (`mark`, `wait`).
        """
        _check(memory, nbytes)
        if memory.readonly:
            # The driver would write to it all the same.
            raise InternalError("expected writable memory for a copy from the device")
        pieces = copied_pieces(memory, nbytes)
        copies = [(piece, pointer + at, size) for at, piece, size in pieces]
        self._copy("d2h", "cuMemcpyDtoHAsync", copies, nbytes)

    def d2d(self, to: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``source`` to ``to`` on this device."""
        self._copy("d2d", "cuMemcpyDtoDAsync", [(to, source, nbytes)], nbytes)

    def p2p(self, to: int, peer: DeviceContext, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``source`` on this device to ``to`` on another one, whose context is given.

        Without `enable_peer_access` the driver takes them through the host.
        """
        arguments = to, peer.raw, source, self._context.raw, nbytes
        self._copy("p2p", "cuMemcpyPeerAsync", [arguments], nbytes)

    def order_after(self, stream: int) -> None:
        """Let what follows here wait for all that another stream has to do now.

        ``stream``: a handle; 0 or 1 the legacy default stream, 2 the per-thread one. See `outlast`.
        """
        with self._context.pushed():
            self.outlast(stream)
            self._hand_over(stream, self._open())

    def order_before(self, stream: int) -> None:
        """Let what follows on another stream wait for all that this one has to do now.

        A graph cannot wait for what is not of it: where the stream is captured, this waits.
        """
        with self._context.pushed():
            if self.captured(stream):
                self.wait()
                return
            self._hand_over(self._open(), stream)

    def mark(self, other: int | None = None) -> CopyMark:
        """Mark what this stream, or another one, has to do now, to ask or wait for later."""
        stream = self._open() if other is None else other
        with self._context.pushed():
            event = self._take_event()
            try:
                call("cuEventRecord", event, stream)
            except BaseException:
                self._free_events.append(event)
                raise
        return CopyMark(self, event)

    def captured(self, stream: int) -> bool:
        """Return whether a stream is captured, or unusable as long as another one is."""
        with self._context.pushed():
            try:
                return bool(int(call("cuStreamIsCapturing", stream)))
            except CudaError as error:
                # What else it has to say, the next call on the stream does.
                return error.status in CAPTURES

    def outlast(self, stream: int) -> None:
        """Return when a stream is not captured, mostly at once; BridgeError if that lasts too long."""
        deadline = time.monotonic() + _CAPTURE_SECONDS
        while self.captured(stream):
            if time.monotonic() >= deadline:
                raise BridgeError(
                    "a tensor on the GPU cannot be read or handed on while a graph is captured on a "
                    f"stream that uses it, or on one that the legacy stream waits for (stream {stream})",
                    ErrorCode.UNAVAILABLE,
                )
            time.sleep(_LOOK)

    def count_copy(self, kind: str, nbytes: int) -> None:
        """Count a copy, of at least one byte, which others may make."""
        counts = self.counts
        with counts.lock:
            counts.copied[kind] += nbytes
            counts.copies[kind] += 1

    def count_wait(self) -> None:
        """Count a wait for work of this device that is another stream's."""
        with self.counts.lock:
            self.counts.waits += 1

    def wait(self) -> None:
        """Wait for all that this stream has to do; CudaError if the device has failed."""
        try:
            mark = self.mark()
        except CudaError as error:
            if error.sticky:
                raise
            # No event can be had.
            self.count_wait()
            with self._context.pushed():
                sleep_until(self.done)
        else:
            mark.wait()

    def wait_for_all(self) -> None:
        """Wait for all work of this process on the device; raises as `wait`."""
        with self._context.pushed():
            call("cuCtxSynchronize")

    def done(self) -> bool:
        """Return whether this stream has completed its work; raises as `wait`."""
        with self._context.pushed():
            return not status_of("cuStreamQuery", self._open(), expected=(NOT_READY,))

    def close(self) -> None:
        """Wait for what is under way, and give the stream and its events back; idempotent."""
        if self._stream is None:
            return
        with self._context.pushed():
            try:
                self.wait()
            finally:
                stream, self._stream = self._stream, None
                events, self._events = self._events, []
                for event in events:
                    call("cuEventDestroy", event)
                call("cuStreamDestroy", stream)

    def _copy(self, kind: str, name: str, copies: Sequence[tuple[Any, ...]], nbytes: int) -> None:
        """Begin a copy, which counts as one whatever calls it takes."""
        if not nbytes:
            return
        with self._context.pushed():
            for arguments in copies:
                call(name, *arguments, self._open())
        self.count_copy(kind, nbytes)

    def _open(self) -> Any:
        if self._stream is None:
            # None would be the legacy default stream.
            raise InternalError("this copy stream is closed")
        return self._stream

    def _hand_over(self, first: Any, then: Any) -> None:
        # A wait means what is recorded when it is asked for: the event is free again at once.
        event = self._take_event()
        try:
            call("cuEventRecord", event, first)
            call("cuStreamWaitEvent", then, event, 0)
        finally:
            self._free_events.append(event)

    def _take_event(self) -> Any:
        try:
            return self._free_events.pop()
        except IndexError:
            event = call("cuEventCreate", _BLOCKING_SYNC | _DISABLE_TIMING)
            self._events.append(event)
            return event


class CopyMark:
    """A point on a stream, whose maker has its event back with it; worthless when that is closed."""

    __slots__ = ("_event", "_stream")

    def __init__(self, stream: CopyStream, event: Any) -> None:
        self._stream = stream
        self._event = event

    def done(self) -> bool:
        """Return whether the stream has passed it; raises as `CopyStream.wait`."""
        stream = self._stream
        if stream._stream is None:  # close has waited
            return True
        with stream._context.pushed():
            return not status_of("cuEventQuery", self._event, expected=(NOT_READY,))

    def wait(self) -> None:
        """Wait until the stream has passed it, counted by the stream; raises as `CopyStream.wait`."""
        stream = self._stream
        if stream._stream is None:
            return
        stream.count_wait()
        with stream._context.pushed():
            if not soon(self.done):
                # The event is one for which the driver sleeps.
                call("cuEventSynchronize", self._event)

    def order_before(self, other: int) -> None:
        """Let what follows on another stream of this process wait until this is passed.

        Where that is captured, this waits, as `CopyStream.order_before`.
        """
        stream = self._stream
        if stream._stream is None:
            return
        with stream._context.pushed():
            if stream.captured(other):
                if not self.done():
                    self.wait()
                return
            call("cuStreamWaitEvent", other, self._event, 0)

    def __del__(self) -> None:
        # A finalizer makes no call of the driver.
        self._stream._free_events.append(self._event)


def _check(memory: memoryview, nbytes: int) -> None:
    # The driver takes no bounds, only an address.
    if memory.nbytes < nbytes or not memory.c_contiguous:
        raise InternalError(
            f"expected at least {nbytes} contiguous bytes of host memory, got {memory.nbytes}"
        )
