"""Runs the coroutines of a model on one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from gpubridge.pb_utils import Logger

Done = Callable[[Any, "BaseException | None"], None]
"""Takes what a coroutine returns, or None and what it raises."""

_ENDED = "the model has closed the event loop of its coroutines, or a descriptor of that loop: they run no more"

_GIVEN_UP = "the model is being unloaded, and its coroutine goes on though it was cancelled"


class Coroutines:
    """Event loop of one model's coroutines; any thread may use it.

    It owns each coroutine that it was given until that has ended: asyncio holds no task that waits.
    The loop runs on when the model stops it, or a task ends with SystemExit.

    - ``begun``: gets the loop, on its thread, before any coroutine runs.

    Attribute ``awaited``: the task that a thread waits for in :meth:`run`.
    """

    def __init__(self, begun: Callable[[asyncio.AbstractEventLoop], None] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        if begun is not None:
            self._loop.call_soon(begun, self._loop)
        # Of each coroutine, by its identity: the coroutine, and who gets its outcome.
        self._running: dict[int, tuple[Coroutine[Any, Any, Any], Done]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Those that were told: a second time would break their clean-up off.
        self._cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()
        # That which a thread waits for, and its task.
        self._run_now: Coroutine[Any, Any, Any] | None = None
        self.awaited: asyncio.Task[Any] | None = None
        self._wound_up = self._ended = False
        self._thread = threading.Thread(target=self._run, name="model-loop", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Return whether the model has closed the loop."""
        return self._ended

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for it; raises what it raises."""
        outcome: Future[tuple[Any, BaseException | None]] = Future()
        self._run_now = coroutine
        try:
            self.start(coroutine, lambda result, error: outcome.set_result((result, error)))
            result, error = outcome.result()
        finally:
            self._run_now = self.awaited = None
        if error is not None:
            raise error
        return result

    def start(self, coroutine: Coroutine[Any, Any, Any], done: Done) -> None:
        """Run a coroutine concurrently, in a copy of this thread's context; ``done`` is called once.

        On the loop's thread, or here if there is no loop any more.
        """
        self._running[id(coroutine)] = coroutine, done
        try:
            self._loop.call_soon_threadsafe(self._begin, coroutine)
        except RuntimeError:
            self._ended = True
            coroutine.close()
        if self._ended:
            # Its thread may have ended before it saw this one.
            self._finish(coroutine, None, RuntimeError(_ENDED))

    def give_up(self, seconds: float) -> None:
        """Cancel the coroutines that still run; those that go on after a time have an outcome then.

        Does not wait.
        """
        self._begin_soon(self._give_up(seconds))

    def cancel(self, seconds: float) -> None:
        """Cancel the coroutines that still run, and wait for them, at most for a time."""
        if self._running:
            self._call(self._cancel(self._tasks, seconds), seconds)

    def close(self, seconds: float) -> None:
        """Cancel all tasks of the loop, wait for them, at most for a time, and end the loop."""
        self._call(self._wind_up(seconds), seconds)
        self._thread.join(seconds)

    def _run(self) -> None:
        loop = self._loop
        # Until the end of the clean-up, in which tasks may exit or stop the loop, too.
        while not self._wound_up and not loop.is_closed():
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # asyncio ends the loop for it; what else runs there goes on.
                Logger.log_error(
                    f"a task of the model ended with {error!r}; its event loop goes on"
                )
            except BaseException as error:
                # The model runs or closes the loop in another thread, or closes its selector.
                Logger.log_error(f"the event loop of the model's coroutines raised {error!r}")
                break
        self._ended = True
        if not self._wound_up:
            Logger.log_error(_ENDED)
        elif not loop.is_closed():
            loop.close()
        for coroutine, _ in list(self._running.values()):
            self._finish(coroutine, None, RuntimeError(_ENDED))

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(_outcome(coroutine))
        if coroutine is self._run_now:
            self.awaited = task
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(task, coroutine))

    def _end(self, task: asyncio.Task[Any], coroutine: Coroutine[Any, Any, Any]) -> None:
        self._tasks.discard(task)
        # One that is cancelled before it begins has no outcome of its own.
        outcome = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._finish(coroutine, *outcome)

    def _finish(
        self, coroutine: Coroutine[Any, Any, Any], result: Any, error: BaseException | None
    ) -> None:
        entry = self._running.pop(id(coroutine), None)
        if entry is not None:
            entry[1](result, error)

    def _call(self, coroutine: Coroutine[Any, Any, None], seconds: float) -> None:
        """Run a coroutine of this object; wait for it, though the model may block the loop."""
        ended = threading.Event()

        async def work() -> None:
            try:
                await coroutine
            finally:
                ended.set()

        if self._begin_soon(work()):
            ended.wait(2 * seconds)
        else:
            coroutine.close()

    def _begin_soon(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Begin to run a coroutine of this object; returns False where the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._loop.create_task, coroutine)
        except RuntimeError:
            coroutine.close()
            return False
        return True

    async def _give_up(self, seconds: float) -> None:
        running = [coroutine for coroutine, _ in list(self._running.values())]
        await self._cancel(self._tasks, seconds)
        for coroutine in running:
            self._finish(coroutine, None, RuntimeError(_GIVEN_UP))

    async def _cancel(self, tasks: set[asyncio.Task[Any]], seconds: float) -> None:
        for task in list(tasks):
            # Nor one that the model itself has cancelled.
            ends = sys.version_info >= (3, 11) and task.cancelling() > 0
            if not ends and task not in self._cancelled:
                self._cancelled.add(task)
                task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=seconds)

    async def _wind_up(self, seconds: float) -> None:
        me = asyncio.current_task()
        try:
            await self._cancel({task for task in asyncio.all_tasks() if task is not me}, seconds)
            await asyncio.wait_for(self._loop.shutdown_asyncgens(), seconds)
        except asyncio.TimeoutError:
            pass
        finally:
            # Also if a task of the model cancels this one.
            self._wound_up = True
            self._loop.stop()


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Await a coroutine; its exception, even SystemExit, must not end the loop or its thread."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error
