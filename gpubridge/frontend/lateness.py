"""Timeout rules without a clock: callers pass the time."""

from __future__ import annotations

_BYTES_PER_SECOND = 500
_LONGEST = 1024
"""Seconds: who holds much has to send so fast that it could have sent it in this time."""


def bytes_per_second(held: int = 0) -> int:
    """Return how fast something has to go on that holds so many bytes of memory."""
    return max(_BYTES_PER_SECOND, held // _LONGEST)


class Rate:
    """Minimum rate of progress in each window of time; see `bytes_per_second`.

    ``window``: seconds; 0 for a rate that is always fast enough.
    """

    __slots__ = ("_nbytes", "_since", "_what", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._what: object = None
        self._since = 0.0
        self._nbytes = 0

    def too_slow(self, now: float, what: object, nbytes: int, held: int = 0) -> bool:
        """Return whether the window has passed without enough progress.

        - ``what``: what goes on; one that is not equal begins anew. None for nothing.
        - ``nbytes``: how far it has come, in bytes.
        - ``held``: bytes of memory that it holds.
        """
        if what is None or not self._window:
            self._what = None
            return False
        enough = self._window * bytes_per_second(held)
        if what != self._what or nbytes - self._nbytes >= enough:
            self._what, self._since, self._nbytes = what, now, nbytes
            return False
        return now - self._since >= self._window


class Waiting:
    """For how long the same thing has been going on.

    ``most``: seconds; 0 for as long as it likes.
    """

    __slots__ = ("_most", "_since", "_what")

    def __init__(self, most: float) -> None:
        self._most = most
        self._what: object = None
        self._since = 0.0

    def too_long(self, now: float, what: object) -> bool:
        """Return whether ``what``, or its equal, goes on too long; None for nothing."""
        if what is None or not self._most:
            self._what = None
            return False
        if what != self._what:
            self._what, self._since = what, now
            return False
        return now - self._since >= self._most


class Unsent:
    """Minimum rate at which a client takes what is sent to it.

    ``window``: seconds; 0 for a client that may take as long as it likes.
    """

    __slots__ = ("_left", "_rate", "_what")

    def __init__(self, window: float) -> None:
        self._rate = Rate(window)
        self._left = 0
        self._what: object = None

    def too_slow(self, now: float, left: int) -> bool:
        """Return whether the window has passed without enough progress."""
        if left > self._left:
            # More was added: what was sent meanwhile cannot be told.
            self._what = object()
        self._left = left
        return self._rate.too_slow(now, self._what if left else None, -left, left)
