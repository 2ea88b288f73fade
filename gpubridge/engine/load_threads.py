"""Threads for file system calls of model loads, which may never return (a dead mount)."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from gpubridge.errors import unavailable

_THREADS = 16
_PATIENCE_SECONDS = 0.25
_TELL_AFTER_SECONDS = 5.0
ANSWER_SECONDS = 2.0
"""Wait this long for a file system; then go on without it where possible."""

_Result = TypeVar("_Result")
_Key = TypeVar("_Key", bound=Hashable)

_logger = logging.getLogger(__name__)


class LoadThreads:
    """Runs each call that may hang in a daemon thread of its own.

    The number of concurrent calls is limited; a slow call gives its slot up after a moment. Daemon
    threads let the process exit although a call never returns.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_THREADS)

    async def run(
        self, what: str, work: Callable[[], _Result], *, log_slow: bool = True
    ) -> _Result:
        """Run ``work`` in a thread; return its result or raise its exception.

        ``what``: describes the work in the log, unless ``log_slow`` is false, for work that is
        expected to take long. Cancelling the caller does not stop the thread.

        Raises BridgeError: UNAVAILABLE when the system cannot create a thread.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        thread = _LoadThread(work, loop)
        # Called once, by the timer or in `finally`: a due timer may be cancelled before it runs.
        release = _once(self._slots.release)
        slot = loop.call_later(_PATIENCE_SECONDS, release)
        log_timer = loop.call_later(_TELL_AFTER_SECONDS, thread.log_slow, what)
        if not log_slow:
            log_timer.cancel()
        try:
            thread.start()
            result: _Result = await thread.result
        except RuntimeError as error:
            if thread.ident is None:
                raise unavailable(f"{what}: {error}") from error
            raise
        finally:
            release()
            slot.cancel()
            log_timer.cancel()
        return result


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``call`` on its first call only."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


class _LoadThread(threading.Thread):
    """A thread for one call; ``result`` is a future of the event loop."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="load", daemon=True)
        self._work = work
        self._loop = loop
        self.result: asyncio.Future[Any] = loop.create_future()

    def run(self) -> None:
        """Do the work; the caller may have been cancelled."""
        try:
            result, error = self._work(), None
        except BaseException as raised:  # noqa: BLE001  (raised to the caller)
            result, error = None, raised
        try:
            self._loop.call_soon_threadsafe(self._finish, result, error)
        except RuntimeError:
            # The event loop has ended.
            pass

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)

    def log_slow(self, what: str) -> None:
        """Log that the work is slow, and the line it is at."""
        frame = sys._current_frames().get(self.ident or 0)
        if frame is not None:
            where = f"{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename}"
            _logger.warning(
                "%s takes longer than %g s, in %s",
                what,
                _TELL_AFTER_SECONDS,
                where,
            )


class LatestAnswers(Generic[_Key, _Result]):
    """Latest results of calls that may hang; each key has at most one call in progress.

    ``patience``: seconds to wait for a result.
    """

    def __init__(
        self,
        ask: Callable[[_Key], Coroutine[Any, Any, _Result]],
        patience: float = ANSWER_SECONDS,
    ) -> None:
        self._ask = ask
        self._patience = patience
        self._asked: dict[_Key, asyncio.Future[_Result]] = {}
        self._answers: dict[_Key, asyncio.Future[_Result]] = {}

    async def get(self, keys: Collection[_Key]) -> dict[_Key, asyncio.Future[_Result]]:
        """Call for every key; return the latest result or exception of each key that has one."""
        for key in keys:
            if key not in self._asked:
                self._asked[key] = asyncio.ensure_future(self._ask(key))
                self._asked[key].add_done_callback(
                    lambda done: done.cancelled() or done.exception()
                )
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._patience)
        for key, asked in list(self._asked.items()):
            if asked.done():
                self._answers[key] = self._asked.pop(key)
        for key in self._answers.keys() - set(keys):
            del self._answers[key]
        return {key: self._answers[key] for key in keys if key in self._answers}
