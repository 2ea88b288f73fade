"""Memory of long answers that are texts or compressed, charged as requests are until clients have read them."""

from __future__ import annotations

from gpubridge.dataplane import owned_view
from gpubridge.errors import BridgeError, Pieces, unavailable
from gpubridge.host_shm import Budget

_LONG = 1 << 16


def charged(budget: Budget, texts: Pieces) -> list[bytes | memoryview] | BridgeError:
    """Charge the long ones of an answer's private pieces; each is uncharged when its memory is freed.

    Returns an error, UNAVAILABLE, where there is no memory for them: one that is raised would keep them in
    the frames of its traceback.
    """
    nbytes = sum(len(text) for text in texts if len(text) > _LONG)
    if not nbytes:
        return list(texts)
    try:
        budget.take(nbytes, large=True)
    except BridgeError as error:
        return unavailable(
            f"there is no memory for an answer of {nbytes} bytes in JSON or compressed ({error.message}); "
            "read answers faster, or ask for binary outputs without compression"
        )
    return [
        owned_view(text, _Charge(budget, len(text))) if len(text) > _LONG else text
        for text in texts
    ]


class _Charge:
    """A charge, already taken, that is given back with this object."""

    __slots__ = ("_budget", "_nbytes")

    def __init__(self, budget: Budget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._budget.give_back(self._nbytes)
