"""Charges what the open calls of a stub's model keep in the server beside their tensors."""

from __future__ import annotations

from functools import partial

from gpubridge.dataplane import CallChannel
from gpubridge.errors import BridgeError
from gpubridge.frontend.kept_bytes import KeptBytes
from gpubridge.host_shm import Account, Body, Budget


class ChargedCalls:
    """The charge of one stub's open calls, as of what clients' connections keep.

    - ``budget``: of all requests; ``account``: the stub's.
    - ``model``: the name of the calling model.
    - ``channel``: the calls, once they are there.
    """

    channel: CallChannel

    def __init__(self, budget: Budget, account: Account, model: str) -> None:
        self._new_charge = partial(Body, budget, account)
        self._model = model
        self._kept = KeptBytes()

    def charge(self, nbytes: int) -> int:
        """Charge what is kept now; return the charge, less where memory for more is short."""
        return self._kept.count(nbytes, self._new_charge, self._shed)

    def raise_shortage(self, calls: int, nbytes: int) -> None:
        """Raise BridgeError, as there is no memory for another call beside so many."""
        shortage = self._kept.shortage
        assert shortage is not None
        raise BridgeError(
            f"the {calls} open calls of model '{self._model}' keep {nbytes} bytes beside their tensors, and "
            f"there is no memory for more: {shortage.message}",
            shortage.code,
        )

    def close(self) -> None:
        """Give the charge back."""
        self._kept.close()

    def _shed(self, _: BridgeError) -> int:
        """Let go of nothing: open calls go on, as what they wait for may come yet."""
        self.channel.charged = 0
        return self.channel.kept
