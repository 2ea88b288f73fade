"""Messages of a stream that are not taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class WaitingMessages(deque[bytes]):
    """The messages, in their order.

    Attributes: ``nbytes``, the bytes of all; ``later``, whether the next turn of the event loop goes on with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.later = False

    def add(self, messages: Sequence[bytes]) -> None:
        """Add messages that have come."""
        self.extend(messages)
        self.nbytes += sum(map(len, messages))

    def take(self) -> None:
        """Remove the first one."""
        self.nbytes -= len(self.popleft())

    def clear(self) -> None:
        """Remove all."""
        super().clear()
        self.nbytes = 0
