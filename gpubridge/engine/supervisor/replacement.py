"""Replacement stub: started in advance for an instance whose stubs keep dying."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError

if TYPE_CHECKING:
    from gpubridge.engine.supervisor.stub_run import StubRun

_REAP_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class ReplacementStub:
    """Keeps a stub ready for one instance; owns it until `take`.

    A client that repeats a request that kills the stub then delays other requests less.

    - ``start``: starts a stub; raises BridgeError.
    - ``close``: releases a dead stub.
    """

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, StubRun]],
        close: Callable[[StubRun], object],
        instance: str,
    ) -> None:
        self._start = start
        self._close = close
        self._instance = instance
        self._deaths = (float("-inf"), float("-inf"))
        self._due: asyncio.TimerHandle | None = None
        self._starting: asyncio.Task[StubRun] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def exists(self) -> bool:
        """Return whether the stub is planned, starting or ready."""
        return self._due is not None or self._starting is not None

    def note_death(self) -> None:
        """Record the death of a stub of the instance."""
        self._deaths = self._deaths[1], time.monotonic()

    def wanted(self, seconds: float) -> bool:
        """Return whether two stubs died within the last ``seconds``."""
        return time.monotonic() - self._deaths[0] < seconds

    def plan(self, delay: float) -> None:
        """Start the stub after ``delay`` seconds."""
        self._due = asyncio.get_running_loop().call_later(delay, self._begin)

    def _begin(self) -> None:
        self._due = None
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def _take_task(self) -> asyncio.Task[StubRun] | None:
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        starting, self._starting = self._starting, None
        return starting

    async def take(self) -> StubRun | None:
        """Hand the stub over once it is ready; return None if there is none or it failed."""
        starting = self._take_task()
        if starting is None:
            return None
        try:
            run = await starting
        except BridgeError as error:
            _logger.warning(
                "the replacement process of instance '%s' failed to start: %s",
                self._instance,
                error.message,
            )
            return None
        if run.exited.done():
            self._close(run)
            return None
        return run

    def expire(self, seconds: float) -> None:
        """End the stub, which is no longer needed, if there is one."""
        if self.exists:
            self._ending = asyncio.get_running_loop().create_task(self.end(seconds))

    async def end(self, seconds: float) -> None:
        """End the stub, if there is one; finalize its model within ``seconds``."""
        starting = self._take_task()
        if starting is None:
            return
        if not starting.done():
            starting.cancel()
        await asyncio.wait([starting])
        if starting.cancelled() or starting.exception() is not None:
            return
        run = starting.result()
        await run.finalize(seconds)
        await asyncio.wait([run.exited], timeout=_REAP_SECONDS)
        self._close(run)
