"""Memory of the server alone for a body that is on its way."""

from __future__ import annotations

from gpubridge.dataplane import GrowingMemory
from gpubridge.errors import BridgeError
from gpubridge.host_shm.budget import Body, PrivateBytes, piece_bytes


class PrivateMemory(PrivateBytes):
    """Memory for a body of ``nbytes``, which grows as the body arrives.

    Attribute ``memory``: the part that is there; views of it stay where they are.

    Raises BridgeError: UNAVAILABLE, having released the body, if it can never fit.
    """

    __slots__ = ("_arrived", "_granted", "memory")

    def __init__(self, nbytes: int, body: Body) -> None:
        super().__init__(body)
        try:
            body.budget.check(nbytes)
        except BridgeError:
            body.release()
            raise
        self.memory = GrowingMemory(nbytes)
        self._arrived = self._granted = 0

    @property
    def arrived(self) -> int:
        """Return how many bytes `put` has got."""
        return self._arrived

    @property
    def whole(self) -> bool:
        """Return whether `put` has got the whole body."""
        return self._arrived == len(self.memory)

    def put(self, data: memoryview) -> None:
        """Append bytes of the body; raises BridgeError: UNAVAILABLE if memory is short."""
        at, self._arrived = self._arrived, self._arrived + len(data)
        while self._granted < self._arrived:
            self._granted = self.grow(self._granted, len(self.memory))
        memoryview(self.memory)[at : self._arrived] = data

    def grow(self, at: int, end: int) -> int:
        """Return the end of the memory for the next bytes; as `RequestArena.grow`."""
        upto = at + piece_bytes(at, end - at)
        self.count(upto)
        self.memory.resize(upto)
        return upto
