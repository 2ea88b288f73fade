"""Charges what a client has its connection keep beside large messages: heads, calls, small messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Body, PrivateBytes

Refuse = Callable[[BridgeError], None]
Shed = Callable[[BridgeError], int]
"""Lets go of what need not be kept, as others need the memory; returns the bytes that are still kept."""

UNCHARGED = 1 << 17
"""So few bytes are not charged; as csrc/memory/kept_bytes.h has it."""


class KeptBytes:
    """One charge for all that a connection keeps so; it is made when there is something to charge.

    Attributes ``counted``: the bytes that are charged; ``shortage``: why there was no memory last.
    """

    __slots__ = ("_charge", "counted", "shortage")

    def __init__(self) -> None:
        self._charge: PrivateBytes | None = None
        self.counted = 0
        self.shortage: BridgeError | None = None

    def count(self, nbytes: int, new_charge: Callable[[Refuse], Body], shed: Shed) -> int:
        """Charge what is kept now; return the charge, less where memory for more is short.

        ``new_charge``: returns the charge, given what refuses when memory runs out, now or later.
        """
        if not nbytes:
            # Another one can be refused again.
            self.close()
            return 0
        if self._charge is None:
            self._charge = PrivateBytes(new_charge(partial(self._refuse, shed)))
        try:
            self._charge.count(nbytes)
            self.counted = nbytes
        except BridgeError as error:
            self._refuse(shed, error)
        return self.counted

    def close(self) -> None:
        """Give the charge back; idempotent."""
        charge, self._charge = self._charge, None
        self.counted = 0
        if charge is not None:
            charge.close()

    def _refuse(self, shed: Shed, error: BridgeError) -> None:
        """Charge what is left when what can be is let go of."""
        self.shortage = error.copy()
        left = min(self.counted, shed(error))
        if left <= UNCHARGED:
            self.close()
        elif self._charge is not None:
            self._charge.count(left)
            self.counted = left
