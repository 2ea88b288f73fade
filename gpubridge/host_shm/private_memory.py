"""Memory for a body of which it is not known yet for which model it is."""

from __future__ import annotations

import mmap

from gpubridge.host_shm.budget import Body, piece_bytes

__all__ = ["PrivateMemory"]


class PrivateMemory:
    """Memory of this process alone, which counts as it is handed out.

    Parameters
    ----------
    nbytes : int
        Bytes that the body takes at the most.
    body : Body
        What it is charged to.

    Raises
    ------
    BridgeError
        UNAVAILABLE when it would never fit.

    Attributes
    ----------
    memory : memoryview
        All of it.
    """

    __slots__ = ("_body", "_counted", "memory")

    def __init__(self, nbytes: int, body: Body) -> None:
        body.budget.check(nbytes)
        self._body = body
        self._counted = 0
        # Not a bytearray: that would write zeros to all of it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = memoryview(mmap.mmap(-1, nbytes, flags=flags))

    def piece(self, at: int, end: int) -> memoryview:
        """Return memory for what arrives next; as `RequestArena.piece`.

        Raises
        ------
        BridgeError
            UNAVAILABLE when there is no room for it.
        """
        upto = at + piece_bytes(at, end - at)
        self._body.charge(upto)
        self._body.budget.take(upto - self._counted, large=True, body=self._body)
        self._counted = upto
        return self.memory[at:upto]

    def close(self) -> None:
        """Count it no more; views of it that exist keep it."""
        counted, self._counted = self._counted, 0
        self._body.budget.give_back(counted)
