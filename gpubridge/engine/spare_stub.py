"""A stub that is started ahead, for an instance whose stubs die: the next one takes over at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from gpubridge.errors import BridgeError

if TYPE_CHECKING:
    from gpubridge.engine.stub_run import StubRun

_REAP_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class SpareStub:
    """Keeps a stub ready for one instance; owns that stub until somebody takes it.

    A request that kills its stub, sent again and again, then costs others no wait for a start.

    - ``start``: starts a stub; raises BridgeError.
    - ``close``: lets go of a dead one.
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
        """True if there is one, or will be."""
        return self._due is not None or self._starting is not None

    def note_death(self) -> None:
        """Note that a stub of the instance died."""
        self._deaths = self._deaths[1], time.monotonic()

    def wanted(self, seconds: float) -> bool:
        """Return whether two stubs died within the last ``seconds``."""
        return time.monotonic() - self._deaths[0] < seconds

    def plan(self, delay: float) -> None:
        """Start one after a while."""
        self._due = asyncio.get_running_loop().call_later(delay, self._begin)

    def _begin(self) -> None:
        self._due = None
        self._starting = asyncio.get_running_loop().create_task(self._start())

    def _give_up(self) -> asyncio.Task[StubRun] | None:
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        starting, self._starting = self._starting, None
        return starting

    async def take(self) -> StubRun | None:
        """Return the stub once it is ready, the caller's from now on; None if there is none."""
        starting = self._give_up()
        if starting is None:
            return None
        try:
            run = await starting
        except BridgeError as error:
            _logger.warning(
                "a process started ahead for instance '%s' failed to start: %s",
                self._instance,
                error.message,
            )
            return None
        if run.exited.done():
            self._close(run)
            return None
        return run

    def expire(self, seconds: float) -> None:
        """End a stub that is not needed any more, if there is one."""
        if self.exists:
            self._ending = asyncio.get_running_loop().create_task(self.end(seconds))

    async def end(self, seconds: float) -> None:
        """End the stub, if there is one: its model is finalized within ``seconds``."""
        starting = self._give_up()
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
