"""Bytes in CUDA memory: where they are, who keeps them there, and when they are complete.

No driver is loaded or called here: what can wait for streams is given by the process that has the
device (``gpubridge.cuda_ipc.CopyStream`` in a stub).
"""

from __future__ import annotations

from typing import Protocol

#: CUDA's own numbers of its default streams, which DLPack and the CUDA array interface use, too.
LEGACY_STREAM, PER_THREAD_STREAM = 1, 2


class Ready(Protocol):
    """Tells when bytes are complete; a stream on which they are made is one."""

    def order_before(self, stream: int, /) -> None:
        """Let what is submitted to a stream from now on wait until the bytes are complete."""

    def done(self) -> bool:
        """Tell whether the bytes are complete."""

    def wait(self) -> None:
        """Return when the bytes are complete; the GIL is released meanwhile."""


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
    - ``owner_stream``: where the library that the bytes are of may write to them again when the
      model has them back. None where they are the bridge's.
    - ``ready``: tells when the bytes are complete; None if they are.
    - ``read_only``: whether consumers are told not to write (those that can be told).
    - ``shared``: whether others may write to the memory at any time: it is another library's, or
      was handed out.
    - ``streams``: those on which others may still read or write the bytes. Before memory is read
      for sending or given to others, `order_into` has to be called, or the same be done for each.
    """

    __slots__ = (
        "__weakref__",
        "nbytes",
        "ordinal",
        "owner",
        "owner_stream",
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
        streams: set[int] | None = None,
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.owner = owner
        self.owner_stream: int | None = None
        self.ready = ready
        self.read_only = read_only
        self.shared = shared
        self.streams: set[int] = set() if streams is None else streams

    def hand_out(self, stream: int | None) -> None:
        """Let a consumer's stream use the bytes from now on, in the numbers of ``__dlpack__``.

        ``stream``: None is the legacy default stream; with -1 the consumer orders for itself.
        """
        # DLPack forbids 0, as the default stream of some and of each thread of others; the legacy
        # stream is ordered with both.
        stream = stream or LEGACY_STREAM
        if stream < -1:
            raise ValueError(
                "expected stream to be None, -1, 1 (legacy default), 2 (per-thread default) or a "
                f"CUDA stream's handle, got {stream}"
            )
        if stream != -1 and self.ready is not None:
            self.ready.order_before(stream)
        self.shared = True
        # The legacy stream waits for the per-thread streams of all threads; their number means
        # another one in each. Where a consumer goes on its own, it is the best that is known.
        self.streams.add(LEGACY_STREAM if stream in (-1, PER_THREAD_STREAM) else stream)

    def complete(self) -> None:
        """Return when the bytes are complete: what consumers need who do not name a stream."""
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
