"""What was done on GPUs for a model: copies by kind, and waits for their completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["DeviceWork"]

_KINDS = ("h2d", "d2h", "d2d", "p2p")


class DeviceWork:
    """Bytes and number of copies by kind, and completion waits.

    Parameters
    ----------
    words : sequence of int
        The bytes of ``h2d``, ``d2h``, ``d2d``, ``p2p``, the copies of each, and the waits.
    """

    __slots__ = ("_words",)

    def __init__(self, words: Sequence[int] = (0,) * 9) -> None:
        self._words = list(words)

    def add(self, words: Iterable[int]) -> None:
        """Add what was done besides."""
        self._words = [a + b for a, b in zip(self._words, words, strict=True)]

    def plus(self, words: Iterable[int]) -> DeviceWork:
        """Return this with something added to it."""
        work = DeviceWork(self._words)
        work.add(words)
        return work

    def include(self, other: DeviceWork) -> None:
        """Add what another object has."""
        self.add(other._words)

    def copied(self, kind: str, nbytes: int) -> None:
        """Add a copy, and the wait for it."""
        index = _KINDS.index(kind)
        self._words[index] += nbytes
        self._words[index + len(_KINDS)] += 1
        self._words[-1] += 1

    def kinds(self) -> Iterator[tuple[str, int, int]]:
        """Give each kind with its bytes and copies."""
        for index, kind in enumerate(_KINDS):
            yield kind, self._words[index], self._words[index + len(_KINDS)]

    @property
    def waits(self) -> int:
        """Completion waits."""
        return self._words[-1]

    @property
    def any(self) -> bool:
        """Whether there was any."""
        return any(self._words)
