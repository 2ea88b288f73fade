"""What the parts of one connection share."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.frontend.http2.budgets import Budget
from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode
from gpubridge.frontend.http2.handler import StreamHandler
from gpubridge.frontend.http2.limits import Http2Limits
from gpubridge.frontend.http2.settings import PeerSettings
from gpubridge.frontend.http2.streams import ResetMemory, Stream

__all__ = ["ConnectionState"]

_USEFUL_PER_IDLE_FRAME = 4


class ConnectionState:
    """The streams of a connection, how far it has come, and what its peer may still waste.

    Parameters
    ----------
    limits : Http2Limits
        What the peer may ask.
    handler : StreamHandler
        Who serves the streams.
    clock : callable
        Returns seconds that only grow.
    """

    def __init__(
        self, limits: Http2Limits, handler: StreamHandler, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.handler = handler
        self.peer = PeerSettings()
        #: Streams that are not closed, by id.
        self.streams: dict[int, Stream] = {}
        #: Streams reset by us whose late frames are forgiven.
        self.forgiven = ResetMemory(limits.reset_memory, limits.reset_grace_seconds, clock)
        #: The highest id that the peer has used, and the highest that was accepted.
        self.highest_id = 0
        self.last_stream_id = 0
        #: No more streams are accepted.
        self.refusing = False
        self.closed = False
        #: Streams whose response has ended; DATA frames sent.
        self.completed = 0
        self.data_frames = 0
        self._resets = Budget(limits.resets, limits.resets_per_second, 1, clock)
        self._idle = Budget(
            limits.idle_frames, limits.idle_frames_per_second, _USEFUL_PER_IDLE_FRAME, clock
        )

    def spend_reset(self) -> None:
        """Count a stream that the peer has reset or made us reset.

        Raises
        ------
        ConnectionFault
            There were too many.
        """
        if not self._resets.spend(self.completed):
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"expected at most {self.limits.resets} reset streams at once and "
                f"{self.limits.resets_per_second} per second beyond those completed, got more",
            )

    def spend_idle_frame(self, count: int = 1) -> None:
        """Count a frame, or several, that bring nothing forward.

        Raises
        ------
        ConnectionFault
            There were too many.
        """
        if not self._idle.spend(self.completed + self.data_frames, count):
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"expected at most {self.limits.idle_frames} frames without use at once and "
                f"{self.limits.idle_frames_per_second} per second, got more",
            )
