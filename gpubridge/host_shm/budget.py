"""Accounting of request memory: pure rules without clock, sockets or memory.

Bodies that arrive in pieces are charged a piece at a time. Each connection has a share, and may
exceed it while memory is free: at the limit, the newest body of a connection above its share is
refused. No body waits for another. A part of the memory is reserved for small requests.
"""

from __future__ import annotations

from typing import Callable, Protocol

from gpubridge.errors import ArenaFull, BridgeError, unavailable

LARGE_BYTES = 1 << 16
"""Requests of at least this size are large; together they may not use all memory."""

_FIRST_PIECE = 1 << 19
_GROWTH = 3
"""After the first piece, a body gets at most this many times the bytes that have arrived."""
_SHARES = 8
_KEPT = 10
_UNPACKED = 16
"""A body may become so many times as long by decompression."""
_UNPACKED_BYTES = 16 << 20
"""A body may become as long as this, or as a share, in any case."""


class Reclaimable(Protocol):
    """Memory that counts towards the budget."""

    def reclaim(self) -> None:
        """Release unused memory, by `Budget.give_back`."""


class Account:
    """Memory that one connection uses.

    ``unread``: returns the bytes of responses that its client has not read yet, which count as well.

    Public attributes:

    - ``held``: bytes of its large requests, from their arrival until their memory is freed.
    - ``promised``: bytes that its large requests have addresses for.
    - ``stored``: bytes of responses that wait until it reads those before them.
    """

    __slots__ = ("_unread", "held", "promised", "stored")

    def __init__(self, unread: Callable[[], int]) -> None:
        self._unread = unread
        self.held = 0
        self.promised = 0
        self.stored = 0

    @property
    def total(self) -> int:
        """Bytes of requests and unread responses."""
        return self.held + self.stored + self._unread()

    def close(self) -> None:
        """Drop the unread responses: the connection is closed."""
        self._unread = int


class Body:
    """A large body while it arrives, and then its request.

    - ``account``: the connection's.
    - ``refuse``: answers the request with an error, having released its memory, which others need.

    Public attributes:

    - ``budget``: as given.
    - ``held``: bytes charged to the connection.
    """

    __slots__ = ("_account", "_promised", "_refuse", "budget", "held")

    def __init__(
        self, budget: Budget, account: Account, refuse: Callable[[BridgeError], None]
    ) -> None:
        self.budget = budget
        self._account = account
        self._refuse = refuse
        self._promised = 0
        self.held = 0
        budget.arriving[self] = None

    @property
    def above_share(self) -> bool:
        """Return whether the connection uses more than its share."""
        return self._account.total > self.budget.share

    @property
    def released(self) -> bool:
        """Return whether the request has ended, or was refused."""
        return self._refuse is _is_gone

    @property
    def promised(self) -> int:
        """Return the bytes that all large requests of the connection have addresses for."""
        return self._account.promised

    def promise(self, nbytes: int) -> None:
        """Set the bytes that the body has addresses for, whether they come or not."""
        self._account.promised += nbytes - self._promised
        self._promised = nbytes

    def charge(self, nbytes: int) -> None:
        """Set the bytes charged to the connection."""
        self._account.held += nbytes - self.held
        self.held = nbytes

    def complete(self) -> None:
        """Note that the body has arrived, so that it can no longer be refused."""
        self.budget.arriving.pop(self, None)

    def release(self) -> None:
        """End all charges, and forget the request; idempotent."""
        self.complete()
        self.charge(0)
        self.promise(0)
        self._refuse = _is_gone

    def set_refuse(self, refuse: Callable[[BridgeError], None]) -> None:
        """Replace the function that answers the request with an error."""
        self._refuse = refuse

    def beside(self) -> Body:
        """Return the charge of another part of the same body."""
        return Body(self.budget, self._account, self._refuse)

    def refuse(self, error: BridgeError) -> None:
        """Answer the request with an error."""
        self.complete()
        self._refuse(error)


def _is_gone(error: BridgeError) -> None:
    """Ignore an error: the request has ended."""


def piece_bytes(arrived: int, left: int) -> int:
    """Return the size of a body's next piece of memory, limited by the bytes that have arrived."""
    return min(left, max(_FIRST_PIECE, _GROWTH * arrived))


class Budget:
    """Budget of memory for the requests of all models.

    ``limit``: bytes.

    Public attributes:

    - ``used``: bytes that may be in memory, of requests or of free slots.
    - ``share``: bytes that one connection may use while others need memory.
    - ``arriving``: the large bodies that are arriving, the newest last.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.share = limit // _SHARES
        self.arriving: dict[Body, None] = {}
        self._large_limit = limit - limit // _KEPT
        self._memories: list[Reclaimable] = []

    def add(self, memory: Reclaimable) -> None:
        """Add memory that can be reclaimed."""
        self._memories.append(memory)

    def check(self, nbytes: int) -> None:
        """Refuse a message that exceeds the limit by itself.

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

        Raises BridgeError: UNAVAILABLE if memory is short and no other request can be refused, having
        released ``body`` if its own request was.
        """
        most = self._large_limit if large else self.limit
        if self.used + nbytes > most:
            self._free_memory(nbytes, most, body)
        self.used += nbytes

    def fits(self, nbytes: int) -> bool:
        """Return whether large memory could be taken without reclaiming any."""
        return self.used + nbytes <= self._large_limit

    def give_back(self, nbytes: int) -> None:
        """Uncount memory whose pages were released."""
        self.used -= nbytes

    def _free_memory(self, nbytes: int, most: int, body: Body | None) -> None:
        while not self._reclaimed(nbytes, most):
            victim = next((each for each in reversed(self.arriving) if each.above_share), None)
            if victim is None or victim is body:
                raise self._full(nbytes)
            victim.refuse(self._full(victim.held))
            if body is not None and body.released:
                # The refused one is charged for another part of the same request.
                raise self._full(nbytes)

    def _reclaimed(self, nbytes: int, most: int) -> bool:
        """Reclaim unused memory until ``nbytes`` fit; return whether they do."""
        for memory in self._memories:
            if self.used + nbytes <= most:
                return True
            memory.reclaim()
        return self.used + nbytes <= most

    def _full(self, nbytes: int) -> BridgeError:
        return ArenaFull(
            f"shared memory arena is full: {nbytes} bytes asked for, {self.used} of "
            f"{self.limit} bytes are in use; send fewer or smaller requests at once, or raise "
            "the limit (--request-arena-limit)"
        )


class PrivateBytes:
    """Private memory of the caller that is charged to a body."""

    __slots__ = ("_body", "_counted")

    def __init__(self, body: Body) -> None:
        self._body = body
        self._counted = 0

    def count(self, nbytes: int) -> None:
        """Set the number of bytes, which are about to be used.

        Raises BridgeError: UNAVAILABLE if memory is short.
        """
        body = self._body
        body.charge(nbytes)
        more = max(0, nbytes - self._counted)
        if more:
            body.budget.take(more, large=True, body=body)
        # By now it may have been counted again, for a request that was refused to make room.
        body.budget.give_back(self._counted + more - nbytes)
        self._counted = nbytes
        body.charge(nbytes)

    def check_unpacked(self, nbytes: int, packed: int) -> None:
        """Refuse ``packed`` bytes that become too many by decompression, by now ``nbytes``.

        Raises BridgeError: UNAVAILABLE, with both numbers.
        """
        most = max(self._body.budget.share, _UNPACKED_BYTES, _UNPACKED * packed)
        if nbytes > most:
            raise unavailable(
                f"{packed} bytes that become more than {most} bytes by decompression are refused "
                f"({_UNPACKED} times as many, {_UNPACKED_BYTES >> 20} MiB, or an eighth of "
                "--request-arena-limit); send them without compression, or raise the limit"
            )

    def complete(self) -> None:
        """Note that the body has arrived, so that it can no longer be refused."""
        self._body.complete()

    def set_refuse(self, refuse: Callable[[BridgeError], None]) -> None:
        """Replace the function that answers the request with an error."""
        self._body.set_refuse(refuse)

    def close(self) -> None:
        """Uncount all bytes; idempotent."""
        counted, self._counted = self._counted, 0
        self._body.budget.give_back(counted)
        self._body.release()
