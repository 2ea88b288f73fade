"""How many requests a stub is fed ahead: so that it never waits, and little is lost if it dies."""

from __future__ import annotations

_AHEAD_NS = 1_000_000
"""About this much work."""
_LIMIT = 64


class FeedWindow:
    """Follows how long a stub's requests take."""

    __slots__ = ("_execute_ns", "_least")

    def __init__(self) -> None:
        self._execute_ns = 0.0
        self._least = 1

    def forget(self, least: int) -> None:
        """Another stub comes, which may have so many requests at once however long they take."""
        self._execute_ns = 0.0
        self._least = least

    def observe(self, requests: int, execute_ns: int) -> None:
        """Take how long requests were executed, one after another."""
        if requests:
            mean = execute_ns / requests
            self._execute_ns += (mean - self._execute_ns) * (0.125 if self._execute_ns else 1.0)

    @property
    def size(self) -> int:
        """Requests that the stub may have at once."""
        return max(self._least, min(_LIMIT, int(_AHEAD_NS / (self._execute_ns + 1.0))))
