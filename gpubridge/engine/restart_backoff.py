"""How long an instance whose stub keeps dying waits before it starts another."""

from __future__ import annotations

__all__ = ["RestartBackoff"]

_FIRST = 0.1
_HEALTHY_AFTER = 10.0


class RestartBackoff:
    """The rule, without a clock: none the first time, then a wait that doubles up to a limit.

    Parameters
    ----------
    limit : float
        Seconds.
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def after(self, seconds: float) -> float:
        """Return the wait that comes after one of ``seconds``."""
        return min(max(2 * seconds, _FIRST), self._limit)

    def was_healthy(self, seconds: float) -> bool:
        """Whether a stub that ran for so long has not died of what the last ones died of."""
        return seconds > _HEALTHY_AFTER
