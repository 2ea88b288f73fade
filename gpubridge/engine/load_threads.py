"""Threads in which loads wait for file systems, any of which may never answer."""

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
"""File systems that have not answered by then are gone on without, where that is possible."""

_Result = TypeVar("_Result")
_Key = TypeVar("_Key", bound=Hashable)

_logger = logging.getLogger(__name__)


class LoadThreads:
    """Runs work that may hang beside the event loop, each piece in a thread of its own.

    Few run at a time; one that takes long keeps no other from running. The threads are daemons: the
    process ends although one never returns.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_THREADS)

    async def run(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return what ``work`` returns, or raise what it raises; ``what`` it is, for the log.

        A caller that is cancelled leaves the thread alone.

        Raises BridgeError: UNAVAILABLE when the system has no thread for it.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        piece = _Piece(work, loop)
        # Called by the timer or here: a timer that is due may be cancelled before it runs.
        release = _once(self._slots.release)
        slot = loop.call_later(_PATIENCE_SECONDS, release)
        told = loop.call_later(_TELL_AFTER_SECONDS, piece.tell, what)
        try:
            piece.start()
            result: _Result = await piece.result
        except RuntimeError as error:
            if piece.ident is None:
                raise unavailable(f"{what}: {error}") from error
            raise
        finally:
            release()
            slot.cancel()
            told.cancel()
        return result


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Return what makes a call the first time that it is called itself."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


class _Piece(threading.Thread):
    """One piece of work; ``result`` is of the event loop."""

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="load", daemon=True)
        self._work = work
        self._loop = loop
        self.result: asyncio.Future[Any] = loop.create_future()

    def run(self) -> None:
        """Do the work; nobody may wait for it any more."""
        try:
            result, error = self._work(), None
        except BaseException as raised:  # noqa: BLE001  (whoever waits gets it)
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

    def tell(self, what: str) -> None:
        """Log that the work takes long, and what it waits in."""
        frame = sys._current_frames().get(self.ident or 0)
        if frame is not None:
            where = f"{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename}"
            _logger.warning(
                "%s takes longer than %g s: it is in %s",
                what,
                _TELL_AFTER_SECONDS,
                where,
            )


class LatestAnswers(Generic[_Key, _Result]):
    """The latest answers to questions that may never be answered; each is asked once at a time.

    ``patience``: seconds that an answer is waited for.
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
        """Ask for every key; returns, for those ever answered, what was answered or raised last."""
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
