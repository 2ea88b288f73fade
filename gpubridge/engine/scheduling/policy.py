"""Interface of all schedulers, so that a model drives any of them in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpubridge.errors import BridgeError, unavailable

Refusal = tuple[Any, BridgeError]

STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Scheduler(Protocol):
    """Decides which requests make the next batch of which instance; does nothing by itself.

    It reads no clock: ``now_ns`` is any clock that never goes back. It owns the items from `add`
    until `take`, `refused`, a `cancel` that returns True, or `clear` gives them away; each comes
    out in exactly one of these ways. A taken item comes back by `put_back` or is reported by
    `answered`.

    ``wants_answers``: whether `answered` must be called at all; where not, every outcome can go out
    at once.
    """

    wants_answers: bool

    @property
    def pending(self) -> int:
        """Return the number of items it holds that were not taken."""

    def cancel(self, item: Any, /) -> bool:
        """Give an item away if it was not taken yet; return whether that was so."""

    def put_back(self, items: Sequence[Any], /) -> None:
        """Take back what was taken last but never started; it goes to the front, in that order."""

    def answered(self, item: Any, now_ns: int, /) -> list[Any]:
        """Hear that a taken item has its outcome; return the items whose outcomes may go out now."""

    def releasable(self) -> list[Any]:
        """Return what else may go out since a `cancel` or `refused` made a gap in the order."""

    def instance_up(self, instance: int, /) -> None:
        """Hear that an instance takes batches, for the first time or again."""

    def instance_died(self, instance: int, now_ns: int, /) -> None:
        """Hear that an instance is gone; its items that never started were put back before."""

    def stop(self) -> None:
        """Accept nothing new; what is held is still given out."""

    def clear(self) -> list[Any]:
        """Give everything away."""


def stopping_error() -> BridgeError:
    """Return the refusal of a scheduler after `Scheduler.stop`."""
    return unavailable(STOPPING)
