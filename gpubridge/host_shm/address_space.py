"""Free ranges of a segment: lent by address, joined again when they come back."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["AddressSpace"]


class AddressSpace:
    """Cuts ranges from ``size`` bytes; the lowest range that is large enough is cut first.

    Parameters
    ----------
    size : int
        Bytes in all.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, size: int) -> None:
        # The free ranges, in order; no two of them touch.
        self._starts = [0]
        self._ends = [size]

    def take(self, nbytes: int) -> int | None:
        """Cut a range; return where it begins, None where no free range is large enough."""
        starts, ends = self._starts, self._ends
        for i, start in enumerate(starts):
            if ends[i] - start >= nbytes:
                if ends[i] - start == nbytes:
                    del starts[i], ends[i]
                else:
                    starts[i] = start + nbytes
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Take a range back that was cut, and join it with its free neighbours."""
        starts, ends = self._starts, self._ends
        end = start + nbytes
        i = bisect_left(starts, start)
        after = i < len(starts) and starts[i] == end
        before = i > 0 and ends[i - 1] == start
        if before and after:
            ends[i - 1] = ends[i]
            del starts[i], ends[i]
        elif before:
            ends[i - 1] = end
        elif after:
            starts[i] = start
        else:
            starts.insert(i, start)
            ends.insert(i, end)
