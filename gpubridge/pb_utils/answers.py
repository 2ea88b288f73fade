"""Futures of event loops for what other models answer; models that await answers load this module."""

from __future__ import annotations

import asyncio
import sys
from asyncio import _get_running_loop, get_running_loop
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from gpubridge.pb_utils.host import ResponseSource


class Ready(asyncio.Future[Any]):
    """Future that ends when there is something to take from a source, which has it as a waiter."""

    __slots__ = ("_source",)

    def __init__(self, source: ResponseSource, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._source: ResponseSource | None = source

    def set(self) -> None:
        """End the future, on its loop; any thread may call this, any number of times."""
        loop = self.get_loop()
        if _get_running_loop() is loop:
            self._end()
            return
        try:
            loop.call_soon_threadsafe(self._end)
        except RuntimeError:
            # The loop is closed: nobody there takes anything. Who reads delivers to others, too.
            self._let_go()

    def _end(self) -> None:
        if not self.done():
            self.set_result(None)

    def _let_go(self) -> ResponseSource | None:
        """Be no waiter any more; returns the source, the first time."""
        source, self._source = self._source, None
        if source is not None:
            source.remove_waiter(self)
        return source


class Answer(Ready):
    """Future of what is taken from a source once it is ready: a response, or an iterator.

    The call goes on until its outcome, though nobody awaits or holds this; cancelling this abandons it.
    """

    __slots__ = ("_open", "_take")

    def __init__(
        self,
        source: ResponseSource,
        take: Callable[[ResponseSource], Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # As the base class does, whose call would take longer; there are many answers.
        asyncio.Future.__init__(self, loop=loop)
        self._source = source
        self._take = take
        self._open = _open_answers(loop)
        source.add_waiter(self)
        self._open.add(self)
        if source.ready:
            # Not at once: a coroutine that awaits such answers alone would never let others run.
            loop.call_soon(self._end)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the future, and its call."""
        cancelled = super().cancel(msg)
        if cancelled:
            # Nobody else has the source, whose end abandons the call.
            self._let_go()
        return cancelled

    def _end(self) -> None:
        source = self._let_go()
        if source is None or self.done():
            return
        try:
            taken = self._take(source)
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(taken)

    def _let_go(self) -> ResponseSource | None:
        self._open.discard(self)
        source, self._source = self._source, None
        if source is not None:
            source.remove_waiter(self)
        return source


_Open = tuple[set[Answer], AsyncGenerator[None, None]]
_open: WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = WeakKeyDictionary()
"""Of each loop its answers that have not come, and what waits for them at its end.

An answer refers to its loop, which lives as long as one has not come.
"""


def _open_answers(loop: asyncio.AbstractEventLoop) -> set[Answer]:
    """Return the answers of a running loop that have not come."""
    entry = _open.get(loop)
    if entry is not None:
        return entry[0]
    answers: set[Answer] = set()
    last = _until_all_came(answers)
    _open[loop] = answers, last
    hooks = sys.get_asyncgen_hooks()
    # The generator would refer to the loop by this hook.
    sys.set_asyncgen_hooks(finalizer=None)
    try:
        # Up to its `yield`: from now on the loop closes it at its end.
        last.asend(None).send(None)
    except StopIteration:
        pass
    finally:
        sys.set_asyncgen_hooks(*hooks)
    return answers


async def _until_all_came(answers: set[Answer]) -> AsyncGenerator[None, None]:
    """Have `asyncio.run` end once each call has its outcome, awaited or not, as Triton's calls do."""
    try:
        yield
    finally:
        while left := [each for each in list(answers) if not each.done()]:
            await asyncio.wait(left)


async def until_ready(source: ResponseSource) -> None:
    """Wait in a coroutine until there is something to take from a source."""
    ready = Ready(source, get_running_loop())
    source.add_waiter(ready)
    try:
        if not source.ready:
            await ready
    finally:
        ready._let_go()
