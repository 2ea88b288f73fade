"""Charges what a client has its connection keep beside large messages, such as heads and small messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpubridge.errors import BridgeError
from gpubridge.host_shm import Body, PrivateBytes

Refuse = Callable[[BridgeError], None]


class KeptBytes:
    """One charge for all that a connection keeps so; it is made when there is something to charge."""

    __slots__ = ("_charge",)

    def __init__(self) -> None:
        self._charge: PrivateBytes | None = None

    def count(self, nbytes: int, new_charge: Callable[[Refuse], Body], shed: Refuse) -> int:
        """Charge what is kept now; return the charge, 0 if that was shed.

        - ``new_charge``: returns the charge, given what refuses when memory runs out, now or later.
        - ``shed``: lets go of what is kept, as others need the memory; the charge is gone before.
        """
        if self._charge is None:
            self._charge = PrivateBytes(new_charge(partial(self._refuse, shed)))
        try:
            self._charge.count(nbytes)
        except BridgeError as error:
            self._refuse(shed, error)
            return 0
        return nbytes

    def close(self) -> None:
        """Give the charge back; idempotent."""
        charge, self._charge = self._charge, None
        if charge is not None:
            charge.close()

    def _refuse(self, shed: Refuse, error: BridgeError) -> None:
        self.close()
        shed(error)
