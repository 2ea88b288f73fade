"""Bytes in CUDA memory: their address, their owner, and the work that completes them.

This module does not load or call the driver: the process that has the device provides the streams
(``gpubridge.cuda_ipc.CopyStream`` in a stub).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpubridge.tensor.streams import (
    LEGACY_STREAM,
    FrameworkStream,
    UsedStreams,
    current_streams,
    named_stream,
    others_imported,
    remember,
    remember_unnamed,
)


class Ready(Protocol):
    """Completion of bytes on a device; a stream that writes them is one implementation."""

    def order_before(self, stream: int, /) -> None:
        """Have later work on a stream wait until the bytes are complete."""

    def done(self) -> bool:
        """Return whether the bytes are complete."""

    def wait(self) -> None:
        """Wait until the bytes are complete, without the GIL."""


class ReadyTogether:
    """Completion of several `Ready` together."""

    def __init__(self, parts: Sequence[Ready]) -> None:
        self._parts = parts

    def order_before(self, stream: int, /) -> None:
        """Have later work on a stream wait until all are complete."""
        for part in self._parts:
            part.order_before(stream)

    def done(self) -> bool:
        """Return whether all are complete."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Wait until all are complete."""
        for part in self._parts:
            if not part.done():
                part.wait()


class OrderingStream(Protocol):
    """A stream of gpubridge on which imported tensors are ordered."""

    @property
    def handle(self) -> int:
        """The ``CUstream``."""

    def mark(self, stream: int | None = None, /) -> Ready:
        """Return the completion of the work submitted so far to this stream, or to another one."""


class DeviceStream(Ready, Protocol):
    """A stream of gpubridge on the device of this process."""

    @property
    def handle(self) -> int:
        """The ``CUstream``."""

    def order_after(self, stream: int, /) -> None:
        """Have later work on this stream wait for the work submitted so far to another one."""


class DeviceBytes:
    """Bytes in CUDA memory of this process.

    - ``owner``: object that keeps the memory; deleted with the last tensor and capsule over it.
    - ``owner_streams``: streams on which the library that owns the bytes may write to them again
      once they are released; None for memory of gpubridge.
    - ``ready``: completion of the bytes; None if they are complete.
    - ``read_only``: whether consumers must not write; only some interfaces can express it.
    - ``shared``: whether others may write to the memory at any time: it is another library's, or
      was exported.
    - ``streams``: streams on which others may still use the bytes, kept alive here, or `ANY_STREAM`. Call `order_into`
      before the memory is read for sending or passed to others.
    """

    __slots__ = (
        "__weakref__",
        "nbytes",
        "ordinal",
        "owner",
        "owner_streams",
        "pointer",
        "read_only",
        "ready",
        "shared",
        "streams",
    )

    def __init__(  # noqa: PLR0913  (the fields of device memory)
        self,
        pointer: int,
        nbytes: int,
        ordinal: int,
        owner: object = None,
        ready: Ready | None = None,
        *,
        read_only: bool = False,
        shared: bool = False,
        streams: UsedStreams | None = None,
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.owner = owner
        self.owner_streams: UsedStreams | None = None
        self.ready = ready
        self.read_only = read_only
        self.shared = shared
        self.streams: UsedStreams = {} if streams is None else streams

    def part(self, offset: int, nbytes: int) -> DeviceBytes:
        """Return some of the bytes, which keep all of them."""
        part = DeviceBytes(
            self.pointer + offset,
            nbytes,
            self.ordinal,
            self,
            self.ready,
            read_only=self.read_only,
            shared=self.shared,
            streams=self.streams,
        )
        part.owner_streams = self.owner_streams
        return part

    def hand_out(self, named: Any) -> None:
        """Export the bytes to a consumer's stream, numbered as in ``__dlpack__``.

        ``named``: a stream's handle, or the object that owns it (`named_stream`); None is the legacy
        default stream or a framework's current one; with -1 the consumer orders its own work.
        """
        stream, owner = named_stream(named)
        if stream is not None and stream < -1:
            raise ValueError(
                "expected stream to be None, -1, 1 (legacy default), 2 (per-thread default) or a "
                f"CUDA stream's handle, got {stream}"
            )
        if stream is None:
            self._order_current(current_streams(self.ordinal))
        elif stream != -1 and self.ready is not None:
            # DLPack forbids 0, which is ambiguous between the legacy and the per-thread default
            # stream; the legacy stream is ordered with both.
            self.ready.order_before(stream or LEGACY_STREAM)
        self.shared = True
        if stream is None or stream == -1:
            remember_unnamed(self.streams, self.ordinal)
        else:
            remember(self.streams, stream or LEGACY_STREAM, self.ordinal, owner)

    def hand_out_unnamed(self) -> None:
        """Export the bytes to a consumer that names no stream.

        It is assumed to be one of the known frameworks, on its current stream. Where none of them uses
        CUDA, or it may be another library, the bytes are complete on return.
        """
        streams = current_streams(self.ordinal)
        if not streams or others_imported():
            self.complete()
        self._order_current(streams)
        self.shared = True
        remember_unnamed(self.streams, self.ordinal)

    def _order_current(self, streams: Sequence[FrameworkStream]) -> None:
        if self.ready is not None:
            for handle in {LEGACY_STREAM, *(stream.handle for stream in streams)}:
                self.ready.order_before(handle)

    def complete(self) -> None:
        """Wait until the bytes are complete."""
        ready = self.ready
        if ready is not None:
            # Waits are counted, so complete bytes must not wait.
            if not ready.done():
                ready.wait()
            self.ready = None

    def order_into(self, stream: DeviceStream) -> None:
        """Have a stream of gpubridge wait until the bytes are complete and unused.

        Only work submitted so far counts: call it once the model has returned the tensor, before the
        memory is read for sending or passed to others.
        """
        if self.ready is not None and self.ready is not stream:
            self.ready.order_before(stream.handle)
        for used in tuple(self.streams):
            stream.order_after(used)
