"""Accounting of request memory: rules without a clock, a socket or a byte of memory.

What arrives in pieces is charged a piece at a time. Each connection has a share, and may take more while nobody else needs
it: when the limit is reached, the newest body of a connection that holds more than its share is refused.
No body ever waits for another. A part of the memory is kept for small requests.
"""

from __future__ import annotations

import mmap
from typing import Callable, Protocol

from gpubridge.errors import BridgeError, unavailable

LARGE_BYTES = 1 << 16
"""Requests of so many bytes are large: what they may take together leaves some to smaller ones."""

_FIRST_PIECE = 1 << 19
_GROWTH = 3
"""A body has memory for at most so many times what has arrived, beside that, once it is past the first."""
_SHARES = 8
_KEPT = 10


class Reclaimable(Protocol):
    """Memory that counts towards the budget."""

    def reclaim(self) -> None:
        """Give back what nobody uses, by `Budget.give_back`."""


class Account:
    """Memory that one connection holds.

    ``unread``: returns the bytes of answers that its client has not read yet: they count, too.

    Attribute ``held``: bytes of its large requests, from their arrival until their memory goes
    back.
    """

    __slots__ = ("_unread", "held")

    def __init__(self, unread: Callable[[], int]) -> None:
        self._unread = unread
        self.held = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.held + self._unread()

    def close(self) -> None:
        """The connection is gone, and what it had not read with it."""
        self._unread = int


class Body:
    """A large body that arrives, and later the request that it has become.

    - ``account``: the connection's.
    - ``refuse``: gets the error that answers the request when its memory is needed elsewhere; gives
      that memory back before it returns.

    Its attributes:

    - ``budget``: as given.
    - ``held``: bytes that are charged to the connection.
    """

    __slots__ = ("_account", "_refuse", "budget", "held")

    def __init__(
        self, budget: Budget, account: Account, refuse: Callable[[BridgeError], None]
    ) -> None:
        self.budget = budget
        self._account = account
        self._refuse = refuse
        self.held = 0
        budget.arriving[self] = None

    @property
    def above_share(self) -> bool:
        """Return whether the connection holds more than its share."""
        return self._account.total > self.budget.share

    def charge(self, nbytes: int) -> None:
        """Charge the connection for all bytes that there is memory for by now."""
        self._account.held += nbytes - self.held
        self.held = nbytes

    def complete(self) -> None:
        """Note that all of it has arrived: it is refused no more."""
        self.budget.arriving.pop(self, None)

    def release(self) -> None:
        """Charge nothing any more; idempotent."""
        self.complete()
        self.charge(0)

    def lead_to(self, refuse: Callable[[BridgeError], None]) -> None:
        """Have another get the error from here on."""
        self._refuse = refuse

    def refuse(self, error: BridgeError) -> None:
        """Have the request answered by an error."""
        self.complete()
        self._refuse(error)


def piece_bytes(arrived: int, left: int) -> int:
    """Return how much memory a body gets next, so that who promises much and sends little holds little."""
    return min(left, max(_FIRST_PIECE, _GROWTH * arrived))


class Budget:
    """The memory for the requests of all models.

    ``limit``: bytes.

    Its attributes:

    - ``used``: bytes that may be in memory, of requests or of free slots.
    - ``share``: bytes that one connection may hold while others need memory.
    - ``arriving``: the large bodies that are on their way, the newest last.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.share = limit // _SHARES
        self.arriving: dict[Body, None] = {}
        self._large_limit = limit - limit // _KEPT
        self._memories: list[Reclaimable] = []

    def add(self, memory: Reclaimable) -> None:
        """Have memory that can be given back for others."""
        self._memories.append(memory)

    def check(self, nbytes: int) -> None:
        """Refuse a message that can never be there as a whole.

        Raises BridgeError: UNAVAILABLE, with both numbers.
        """
        most = self.limit if nbytes < LARGE_BYTES else self._large_limit
        if nbytes > most:
            raise unavailable(
                f"a request of {nbytes} bytes is too large: one may have {most} of the {self.limit} "
                "bytes that all requests together have (--request-arena-limit)"
            )

    def take(self, nbytes: int, *, large: bool, body: Body | None = None) -> None:
        """Count memory that is about to be used, for ``body`` if that is still arriving.

        Raises BridgeError: UNAVAILABLE when there is no room, and no body that has to make room.
        """
        most = self._large_limit if large else self.limit
        if self.used + nbytes > most:
            self._make_room(nbytes, most, body)
        self.used += nbytes

    def has_room(self, nbytes: int) -> bool:
        """Return whether large memory could be taken without any being given back for it."""
        return self.used + nbytes <= self._large_limit

    def give_back(self, nbytes: int) -> None:
        """Count memory no more, whose pages are gone."""
        self.used -= nbytes

    def _make_room(self, nbytes: int, most: int, body: Body | None) -> None:
        while not self._reclaimed(nbytes, most):
            victim = next((each for each in reversed(self.arriving) if each.above_share), None)
            if victim is None or victim is body:
                raise self._full(nbytes)
            victim.refuse(self._full(victim.held))

    def _reclaimed(self, nbytes: int, most: int) -> bool:
        """Give back what nobody uses until there is room; return whether there is."""
        for memory in self._memories:
            if self.used + nbytes <= most:
                return True
            memory.reclaim()
        return self.used + nbytes <= most

    def _full(self, nbytes: int) -> BridgeError:
        return unavailable(
            f"shared memory arena is full: {nbytes} bytes asked for, {self.used} of "
            f"{self.limit} bytes are in use; send fewer or smaller requests at once, or raise "
            "the limit (--request-arena-limit)"
        )


class PrivateBytes:
    """Bytes that somebody keeps for a body, which they are charged to."""

    __slots__ = ("_body", "_counted")

    def __init__(self, body: Body) -> None:
        self._body = body
        self._counted = 0

    def count(self, nbytes: int) -> None:
        """Count so many bytes in all, which are about to be used.

        Raises BridgeError: UNAVAILABLE when there is no room for them.
        """
        self._body.charge(nbytes)
        if nbytes > self._counted:
            self._body.budget.take(nbytes - self._counted, large=True, body=self._body)
        else:
            self._body.budget.give_back(self._counted - nbytes)
        self._counted = nbytes

    def complete(self) -> None:
        """Note that the body has arrived: what it holds is not refused any more."""
        self._body.complete()

    def close(self) -> None:
        """Count nothing any more; idempotent."""
        counted, self._counted = self._counted, 0
        self._body.budget.give_back(counted)
        self._body.release()


class PrivateMemory(PrivateBytes):
    """Memory of ``nbytes`` for a body, counted as it is handed out; UNAVAILABLE if too large."""

    __slots__ = ("memory",)

    def __init__(self, nbytes: int, body: Body) -> None:
        super().__init__(body)
        body.budget.check(nbytes)
        # Not a bytearray: that would write zeros to all of it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = memoryview(mmap.mmap(-1, nbytes, flags=flags))

    def grow(self, at: int, end: int) -> int:
        """Return up to where there is memory for what arrives next; as `RequestArena.grow`."""
        upto = at + piece_bytes(at, end - at)
        self.count(upto)
        return upto
