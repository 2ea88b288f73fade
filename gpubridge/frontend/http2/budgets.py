"""Budgets against peers who make us work for nothing."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Budget"]


class Budget:
    """An allowance that time and useful work give back.

    Parameters
    ----------
    allowance : int
        What may be spent at once, and the most there ever is.
    per_second : float
        What a second gives back.
    per_useful : int
        What each useful piece of work gives back.
    clock : callable
        Returns seconds that only grow. Asked only when the allowance is used up.
    """

    def __init__(
        self, allowance: int, per_second: float, per_useful: int, clock: Callable[[], float]
    ) -> None:
        self._allowance = allowance
        self._per_second = per_second
        self._per_useful = per_useful
        self._clock = clock
        self._left: float = allowance
        self._since = clock()
        self._useful = 0

    def spend(self, useful: int, count: int = 1) -> bool:
        """Spend one or several; return whether there were so many.

        Parameters
        ----------
        useful : int
            How much useful work was done since the beginning.
        """
        if self._left < count:
            now = self._clock()
            regained = (now - self._since) * self._per_second
            regained += (useful - self._useful) * self._per_useful
            self._left = min(self._allowance, self._left + regained)
            self._since = now
            self._useful = useful
            if self._left < count:
                return False
        self._left -= count
        return True
