"""Loads of models, whose messages may have files of hundreds of megabytes."""

from __future__ import annotations

from typing import Any

from gpubridge.frontend.grpc.call import LargeMessageCall, UnaryCall
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.host_shm import Body, Budget
from gpubridge.host_shm.budget import PrivateMemory


class LoadCall(UnaryCall, LargeMessageCall):
    """A load; a large message of it counts against its connection while it is needed.

    ``budget``: of the memory for all that comes.
    """

    def __init__(self, *given: Any, budget: Budget) -> None:
        super().__init__(*given)
        self._budget = budget
        self._memory: PrivateMemory | None = None
        self._arrived = 0

    def large(self, nbytes: int) -> None:
        """Begin to receive a large message."""
        body = Body(self._budget, self._connection.account, self.refuse)
        self._memory = PrivateMemory(nbytes, body)

    def data(self, view: memoryview, end: bool) -> None:
        """Take part of the large message."""
        large = self._memory
        if large is None:
            return
        begin, self._arrived = self._arrived, self._arrived + len(view)
        large.count(self._arrived)
        large.memory[begin : self._arrived] = view
        if self._is_whole(large):
            large.complete()
            self._take(large.memory)
        elif end:
            raise CallFailed(Status.INTERNAL, "the request ends in the middle of its message")

    def check(self, now: float, window: float) -> None:
        """Fail if a large message comes too slowly."""
        if self._memory is not None and not self._is_whole(self._memory):
            self._check_rate(now, window, self._memory, self._arrived, self._arrived)

    def _is_whole(self, large: PrivateMemory) -> bool:
        return self._arrived == len(large.memory)

    def _settle(self) -> None:
        super()._settle()
        large, self._memory = self._memory, None
        if large is not None:
            large.close()
