"""What the receiving half of a connection asks of the whole."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ReaderOwner"]


class ReaderOwner(Protocol):
    """The connection, as far as its reader has to know it."""

    def tell(self, interim: bytes) -> None:
        """Send an interim answer."""

    def update_reading(self) -> None:
        """Read on, or not: the number or the weight of open answers has changed."""

    def close_when_done(self) -> None:
        """Close if this reader reads no more and nothing is left to be answered."""
