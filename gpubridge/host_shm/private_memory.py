"""Memory of this process alone that a large body takes before it is a request."""

from __future__ import annotations

import mmap

from gpubridge.host_shm.budget import Body, piece_bytes

__all__ = ["PrivateBytes", "PrivateMemory"]


class PrivateBytes:
    """Bytes that somebody keeps for a body, and that count.

    Parameters
    ----------
    body : Body
        What they are charged to.
    """

    __slots__ = ("_body", "_counted")

    def __init__(self, body: Body) -> None:
        self._body = body
        self._counted = 0

    def count(self, nbytes: int) -> None:
        """Count so many bytes in all, which are about to be used.

        Raises
        ------
        BridgeError
            UNAVAILABLE when there is no room for them.
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
    """Memory for a body, which counts as it is handed out.

    Parameters
    ----------
    nbytes : int
        Bytes that the body takes at the most.

    Raises
    ------
    BridgeError
        UNAVAILABLE when it would never fit.

    Attributes
    ----------
    memory : memoryview
        All of it.
    """

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
