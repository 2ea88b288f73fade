"""Knows in which calls of a model an ``execute`` is blocked, for the server's search for deadlocks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpubridge.stub.bls.calls import Call

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    Awaited = Callable[[], "asyncio.Task[Any] | None"]


class ExecuteWaits:
    """In which calls the thread of ``execute`` is blocked, or the coroutine that it waits for.

    Made in the thread that runs ``execute``. Whoever reads the call channel asks; it says so only of what
    ends by the call alone: other threads may cancel a call, and a timer may end the wait for one.

    - ``awaited``: returns the task of a coroutine for which ``execute`` waits.
    """

    def __init__(self) -> None:
        self._execute = threading.get_ident()
        # By the thread that waits: of ``execute``, or of an event loop, which stands still.
        self._blocked: dict[int, Call] = {}
        self.awaited: Awaited = _nothing
        # The event loop that runs in the thread of ``execute``, while it does.
        self._own_loop: Callable[[], asyncio.AbstractEventLoop | None] = _nothing

    def by_this_thread(self) -> bool:
        """Return whether this thread is that of ``execute``, or runs an event loop.

        Others that work for a batch may outlive its ``execute``.
        """
        if threading.get_ident() == self._execute:
            return True
        asyncio = sys.modules.get("asyncio")
        return asyncio is not None and asyncio._get_running_loop() is not None

    def runs(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note which event loop runs in this thread, which may be that of ``execute``."""
        if threading.get_ident() == self._execute and self._own_loop() is not loop:
            self._own_loop = weakref.ref(loop)

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Note that this thread waits for a call, in a block."""
        blocks = self.by_this_thread()
        me = threading.get_ident()
        if blocks:
            self._blocked[me] = call
        try:
            yield
        finally:
            if blocks:
                self._blocked.pop(me, None)

    def are_in(self, call: Call) -> bool:
        """Return whether an ``execute`` goes on only once a call has a response."""
        if call.ready:
            return False
        if call in self._blocked.values():
            return True
        for task in (self.awaited(), _main_task(self._own_loop())):
            if task is not None and not _has_timers(task) and _awaits(task, call):
                return True
        return False


def _nothing() -> None:
    """Stand for a model without coroutines."""


def _main_task(loop: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
    """Return the task with whose end a loop ends that runs until then."""
    if loop is None or not loop.is_running():
        return None
    # asyncio names it nowhere else.
    from asyncio import all_tasks, base_events  # noqa: PLC0415

    ends = base_events._run_until_complete_cb  # type: ignore[attr-defined]
    for task in all_tasks(loop):
        if any(callback is ends for callback, _ in getattr(task, "_callbacks", None) or ()):
            return task
    return None


def _has_timers(task: asyncio.Task[Any]) -> bool:
    """Return whether a timer of a task's loop may end what it waits for; unknown loops may have some."""
    timers = getattr(task.get_loop(), "_scheduled", None)
    return timers is None or any(not timer.cancelled() for timer in list(timers))


def _awaits(task: asyncio.Task[Any], call: Call) -> bool:
    """Return whether a task waits for a call: itself, by other tasks, or with others in a `gather`."""
    left: list[Any] = [task]
    while left:
        waited = left.pop()
        if waited in call._waiters:
            return True
        # asyncio tells nobody else what a task waits for.
        following = getattr(waited, "_fut_waiter", None)
        left += [*getattr(waited, "_children", ()), *([] if following is None else [following])]
    return False
