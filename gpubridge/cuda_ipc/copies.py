"""Copies on a separate stream, and the order between it and other streams.

Only functions named `wait` wait; they do so without the interpreter's lock, and waits are counted. On a
stream that is being captured, no event is recorded or waited for.

The driver's own waits keep a processor busy. The ones here sleep; a short copy is polled for a moment
first, since to sleep and be woken takes longer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Any, Callable, TypeVar

from gpubridge.cuda_ipc.context import DeviceContext
from gpubridge.cuda_ipc.driver import CAPTURES, NOT_READY, CudaError, call, status_of
from gpubridge.errors import BridgeError, ErrorCode, InternalError
from gpubridge.tensor.streams import ANY_STREAM, LEGACY_STREAM

_Record = TypeVar("_Record")

_NON_BLOCKING = 1
_BLOCKING_SYNC = 1
_DISABLE_TIMING = 2
_CAPTURE_SECONDS = 10.0
_CAPTURE_POLL_SECONDS = 0.001
_POLL_SECONDS = 50e-6
_PAUSE_SHARE = 8
_LONGEST_PAUSE = 0.02


class CopyCounts:
    """Counters of the work of streams; changed while ``lock`` is held.

    - ``copied``, ``copies``: bytes and number of the copies by kind: ``h2d``, ``d2h``, ``d2d``, ``p2p``.
    - ``waits``: number of waits by a thread.
    """

    __slots__ = ("copied", "copies", "lock", "waits")

    def __init__(self) -> None:
        self.copied = {"h2d": 0, "d2h": 0, "d2d": 0, "p2p": 0}
        self.copies = dict.fromkeys(self.copied, 0)
        self.waits = 0
        # Reentrant: a finalizer that runs in between may copy, too.
        self.lock = threading.RLock()


class CopyStream:
    """A non-blocking stream: it is not ordered with the legacy default stream.

    Any thread may use it, whichever device is current there; its context has to outlive it.

    - ``handle``: the driver's ``CUstream``.
    - ``counts``: counters of its work, which other streams may share.
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

        Pinned memory must not change until the copy is done (`mark`, `wait`); the driver buffers other
        memory before this returns.
        """
        _check(memory, nbytes)
        self._copy("h2d", "cuMemcpyHtoDAsync", pointer, memory, nbytes)

    def d2h(self, memory: memoryview, pointer: int, nbytes: int) -> None:
        """Copy from the device to the host; waits if that memory is not pinned.

        The memory has to exist until the copy is done (`mark`, `wait`).
        """
        _check(memory, nbytes)
        if memory.readonly:
            # The driver would write to it nevertheless.
            raise InternalError("expected writable memory for a copy from the device")
        self._copy("d2h", "cuMemcpyDtoHAsync", memory, pointer, nbytes)

    def d2d(self, to: int, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``source`` to ``to`` on this device."""
        self._copy("d2d", "cuMemcpyDtoDAsync", to, source, nbytes)

    def p2p(self, to: int, peer: DeviceContext, source: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``source`` on this device to ``to`` on the device of ``peer``.

        Without `enable_peer_access` the driver copies through the host.
        """
        context = self._context.raw
        self._copy("p2p", "cuMemcpyPeerAsync", to, peer.raw, source, context, nbytes)

    def order_after(self, stream: int) -> None:
        """Order later work of this stream after the current work of another one.

        ``stream``: a handle; 0 or 1 is the legacy default stream, 2 the per-thread one; or `ANY_STREAM`.
        Waits for the end of a capture, see `wait_for_capture`.
        """
        with self._context.pushed():
            # A wait is for the record that precedes it: the event can be reused at once.
            then, mark = self._open(), self.mark_uncaptured(stream)
            call("cuStreamWaitEvent", then, mark._event, 0)

    def order_before(self, stream: int) -> None:
        """Order later work of another stream after the current work of this one.

        If that stream is captured, this waits: a graph cannot wait for work outside it.
        """
        with self._context.pushed():
            if self.captured(stream):
                self.wait()
                return
            call("cuStreamWaitEvent", stream, self.mark()._event, 0)

    def mark(self, other: int | None = None) -> CopyMark:
        """Mark the end of the current work of this stream, of another one, or of `ANY_STREAM`."""
        stream = self._open() if other is None else other
        with self._context.pushed():
            event = self._take_event()
            try:
                if other == ANY_STREAM:
                    self._record_all(event)
                else:
                    call("cuEventRecord", event, stream)
            except BaseException:
                self._free_events.append(event)
                raise
        return CopyMark(self, event)

    def _record_all(self, event: Any) -> None:
        """Record an event behind all work of this process on the device; waits with older drivers."""
        try:
            call("cuCtxRecordEvent", self._context.raw, event)
        except CudaError as error:
            if error.sticky or error.status in CAPTURES:
                raise
            # A driver before CUDA 12.5 does not have the function.
            self.count_wait()
            self.wait_for_all()
            call("cuEventRecord", event, self._open())

    def mark_uncaptured(self, stream: int) -> CopyMark:
        """Mark the current work of another stream, which is not captured then, see `record_uncaptured`."""
        return self.record_uncaptured(stream, lambda: self.mark(stream), CopyMark.done)

    def record_uncaptured(
        self, stream: int, record: Callable[[], _Record], query: Callable[[_Record], object]
    ) -> _Record:
        """Record an event on a stream that is not captured; waits as `wait_for_capture`.

        A capture that begins in between takes the event, which nothing executes then, or makes the
        record fail: the event is recorded again. ``query`` asks the driver about the event, which
        fails if a capture has taken it; it is called only after that, since it would spoil the capture.
        """
        deadline = time.monotonic() + _CAPTURE_SECONDS
        while True:
            self.wait_for_capture(stream, deadline)
            try:
                recorded = record()
                if not self.captured(stream):
                    query(recorded)
                    return recorded
            except CudaError as error:
                if error.status not in CAPTURES or time.monotonic() >= deadline:
                    raise
                time.sleep(_CAPTURE_POLL_SECONDS)

    def captured(self, stream: int) -> bool:
        """Return whether a stream is captured, or unusable while another one is captured.

        All streams cannot be asked: of `ANY_STREAM` those are that the legacy stream waits for.
        """
        asked = LEGACY_STREAM if stream == ANY_STREAM else stream
        with self._context.pushed():
            try:
                return bool(int(call("cuStreamIsCapturing", asked)))
            except CudaError as error:
                # Other errors are raised by the next call on the stream.
                return error.status in CAPTURES

    def wait_for_capture(self, stream: int, deadline: float) -> None:
        """Wait until a stream is not captured; BridgeError if it still is at a (monotonic) time."""
        while self.captured(stream):
            if time.monotonic() >= deadline:
                raise BridgeError(
                    "a tensor on the GPU cannot be read or shared while a graph is captured on a "
                    f"stream that uses it, or on one that the legacy stream waits for (stream {stream})",
                    ErrorCode.UNAVAILABLE,
                )
            time.sleep(_CAPTURE_POLL_SECONDS)

    def count_copy(self, kind: str, nbytes: int) -> None:
        """Count a copy of at least one byte that is made elsewhere."""
        counts = self.counts
        with counts.lock:
            counts.copied[kind] += nbytes
            counts.copies[kind] += 1

    def count_wait(self) -> None:
        """Count a wait for another stream of this device."""
        with self.counts.lock:
            self.counts.waits += 1

    def wait(self) -> None:
        """Wait until this stream has completed its work; CudaError if the device has failed."""
        try:
            mark = self.mark()
        except CudaError as error:
            if error.sticky:
                raise
            # No event can be recorded.
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
        """Wait for the stream's work, and destroy the stream and its events; idempotent."""
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

    def _copy(self, kind: str, name: str, *arguments: Any) -> None:
        """Start and count a copy by a function of the driver, whose last argument is the number of bytes."""
        nbytes = arguments[-1]
        if not nbytes:
            return
        with self._context.pushed():
            call(name, *arguments, self._open())
        self.count_copy(kind, nbytes)

    def _open(self) -> Any:
        if self._stream is None:
            # None would be the legacy default stream.
            raise InternalError("this copy stream is closed")
        return self._stream

    def _take_event(self) -> Any:
        try:
            return self._free_events.pop()
        except IndexError:
            event = call("cuEventCreate", _BLOCKING_SYNC | _DISABLE_TIMING)
            self._events.append(event)
            return event


class CopyMark:
    """A point on a stream; returns its event to the `CopyStream` that made it, valid until that closes."""

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
            if not _poll_briefly(self.done):
                # The event was created for a sleeping wait.
                call("cuEventSynchronize", self._event)

    def order_before(self, other: int) -> None:
        """Order later work of another stream of this process after this mark.

        If that stream is captured, this waits, as `CopyStream.order_before` does.
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


def sleep_until(done: Callable[[], bool], longest: float = math.inf) -> bool:
    """Poll with pauses of at most an eighth of the time that has passed so far.

    Returns false if it is not done after ``longest`` seconds.
    """
    if _poll_briefly(done):
        return True
    began = time.perf_counter() - _POLL_SECONDS
    while not done():
        passed = time.perf_counter() - began
        if passed >= longest:
            return False
        time.sleep(min(passed / _PAUSE_SHARE, _LONGEST_PAUSE))
    return True


def _poll_briefly(done: Callable[[], bool]) -> bool:
    """Poll for a moment, which each wait costs in processor time; return whether it is done."""
    end = time.perf_counter() + _POLL_SECONDS
    while not done():
        if time.perf_counter() >= end:
            return False
    return True


def _check(memory: memoryview, nbytes: int) -> None:
    # The driver gets an address only, without bounds.
    if memory.nbytes < nbytes or not memory.c_contiguous:
        raise InternalError(
            f"expected at least {nbytes} contiguous bytes of host memory, got {memory.nbytes}"
        )
