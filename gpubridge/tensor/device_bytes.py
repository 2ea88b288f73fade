"""Bytes in CUDA memory: where they are, who keeps them there, and when they are complete.

No driver is loaded or called here: what can wait for streams is given by the process that has the
device (``gpubridge.cuda_ipc.CopyStream`` in a stub).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpubridge.tensor.streams import (
    LEGACY_STREAM,
    FrameworkStream,
    UsedStreams,
    current_streams,
    others_imported,
    remember,
    remember_unnamed,
)


class Ready(Protocol):
    """Tells when bytes are complete; a stream on which they are made is one."""

    def order_before(self, stream: int, /) -> None:
        """Let what is submitted to a stream from now on wait until the bytes are complete."""

    def done(self) -> bool:
        """Tell whether the bytes are complete."""

    def wait(self) -> None:
        """Return when the bytes are complete; the GIL is released meanwhile."""


class ReadyTogether:
    """Tells when several are complete."""

    def __init__(self, parts: Sequence[Ready]) -> None:
        self._parts = parts

    def order_before(self, stream: int, /) -> None:
        """Let what is submitted to a stream from now on wait until all are complete."""
        for part in self._parts:
            part.order_before(stream)

    def done(self) -> bool:
        """Tell whether all are complete."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Return when all are complete."""
        for part in self._parts:
            if not part.done():
                part.wait()


class OrderingStream(Protocol):
    """A stream of the bridge's own, for what libraries bring."""

    @property
    def handle(self) -> int:
        """The ``CUstream``."""

    def mark(self, stream: int | None = None, /) -> Ready:
        """Return what tells when all is done that is on this stream by now, or on another one."""


class DeviceStream(Ready, Protocol):
    """A stream of the bridge's own, on the device of this process."""

    @property
    def handle(self) -> int:
        """The ``CUstream``."""

    def order_after(self, stream: int, /) -> None:
        """Let what is submitted here from now on wait for what is on a stream by now."""


class DeviceBytes:
    """Bytes in CUDA memory of this process.

    - ``owner``: what keeps the memory; it dies with the last tensor and capsule that refers to it.
    - ``owner_streams``: where the library that the bytes are of may write to them again when the
      model has them back. None where they are the bridge's.
    - ``ready``: tells when the bytes are complete; None if they are.
    - ``read_only``: whether consumers are told not to write (those that can be told).
    - ``shared``: whether others may write to the memory at any time: it is another library's, or
      was handed out.
    - ``streams``: those on which others may still read or write the bytes, which are held so that
      they live as long. Before memory is read for sending or given to others, `order_into` has to
      be called, or the same be done for each.
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

    def __init__(  # noqa: PLR0913  (what there is to know of memory)
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

    def hand_out(self, stream: int | None) -> None:
        """Let a consumer's stream use the bytes from now on, in the numbers of ``__dlpack__``.

        ``stream``: None is the legacy default stream, or a framework's current one; with -1 the
        consumer orders for itself.
        """
        if stream is not None and stream < -1:
            raise ValueError(
                "expected stream to be None, -1, 1 (legacy default), 2 (per-thread default) or a "
                f"CUDA stream's handle, got {stream}"
            )
        if stream is None:
            self._order_current(current_streams(self.ordinal))
        elif stream != -1 and self.ready is not None:
            # DLPack forbids 0, as the default stream of some and of each thread of others; the
            # legacy stream is ordered with both.
            self.ready.order_before(stream or LEGACY_STREAM)
        self.shared = True
        if stream is None or stream == -1:
            remember_unnamed(self.streams, self.ordinal)
        else:
            remember(self.streams, stream or LEGACY_STREAM, self.ordinal)

    def hand_out_unnamed(self) -> None:
        """Let a consumer use the bytes from now on that cannot say on which stream.

        It is taken for one of the known frameworks, on its current stream. Where none of them uses
        CUDA, or it may be another library, the bytes are complete when this returns.
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
        """Return when the bytes are complete."""
        ready = self.ready
        if ready is not None:
            # Waits are counted, and what is there already needs none.
            if not ready.done():
                ready.wait()
            self.ready = None

    def order_into(self, stream: DeviceStream) -> None:
        """Let a stream of the bridge's wait until the bytes are complete and nobody uses them.

        What was submitted by now counts: call it when the model has given the tensor back, and
        before the memory is read for sending or given to somebody else.
        """
        if self.ready is not None and self.ready is not stream:
            self.ready.order_before(stream.handle)
        for used in tuple(self.streams):
            stream.order_after(used)
