"""One stream: what may still come, what may still go, and what waits.

States (RFC 9113, section 5.1), of which a server's streams need three::

    idle ──HEADERS──► open ──END_STREAM──► half closed (remote) ──our END_STREAM──► closed
                       └────────our END_STREAM (and then RST_STREAM NO_ERROR)─────────┘

An answer that ends before its request makes the rest of the request useless: the peer is told so,
and there is no half closed (local). A closed stream is forgotten, but for those reset by us, whose
late frames are forgiven for a while (`ResetMemory`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

__all__ = ["ResetMemory", "Stream"]


class Stream:
    """A stream that is not closed. What few streams need are defaults of the class."""

    # Requests pass by in microseconds: an instance only gets what differs from these.

    #: The peer has sent END_STREAM.
    ended = False
    #: Payload goes to ``on_data``, and nothing counts it: no target, no hold, no content-length.
    plain = True
    #: Where the next payload bytes go.
    target: memoryview | None = None
    #: Bytes of its targets that came through memory of ours.
    copied = 0
    #: Credit is only given back by ``consume``.
    holding = False
    #: Bytes that came while holding and are not consumed.
    held = 0
    #: Bytes of the request's content-length that are still to come.
    expected: int | None = None
    #: Response bytes that wait for a window or their turn.
    queue: deque[memoryview] | None = None
    queued = 0
    #: Bytes that have left the queue so far.
    unqueued = 0
    #: The response ends after what is queued, with these trailers if any.
    closing = False
    trailers: bytes | None = None
    #: It is in the sender's round.
    in_round = False
    #: It is closed, whoever still knows it.
    gone = False

    def __init__(self, stream_id: int, window: int, send_window: int) -> None:
        self.stream_id = stream_id
        #: What the peer may still send.
        self.window = window
        #: What we may still send.
        self.send_window = send_window

    def leave(self) -> None:
        """Be closed: let go of all memory."""
        self.gone = True
        self.plain = False
        self.target = None
        self.queue = None
        self.queued = 0
        self.trailers = None


class ResetMemory:
    """The streams that we have reset lately: the peer may not know it yet.

    Parameters
    ----------
    size : int
        How many are remembered at most.
    grace : float
        For how many seconds.
    clock : callable
        Returns seconds that only grow.
    """

    def __init__(self, size: int, grace: float, clock: Callable[[], float]) -> None:
        self._size = size
        self._grace = grace
        self._clock = clock
        self._until: OrderedDict[int, float] = OrderedDict()

    def add(self, stream_id: int) -> None:
        """Remember a stream."""
        self._until[stream_id] = self._clock() + self._grace
        if len(self._until) > self._size:
            self._until.popitem(last=False)

    def __contains__(self, stream_id: int) -> bool:
        """Whether frames of this stream are still forgiven."""
        until = self._until.get(stream_id)
        return until is not None and self._clock() < until
