"""Worker threads beside the event loop, and sets of running tasks."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

from gpubridge.errors import BridgeError, InternalError, unavailable
from gpubridge.telemetry.logs import request_error

HEAVY_BYTES = 1 << 20
"""Larger inputs are read, parsed, formatted or decompressed by a worker."""

_THREADS = 2
_NICE = 10
_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


class Workers:
    """Runs work beside the event loop; owns its threads.

    The work should hold the interpreter's lock for short moments only, as compiled code does. The
    threads have a lower priority than the event loop.

    Attribute ``tasks``: tasks on the event loop that wait for such work.
    """

    def __init__(self) -> None:
        self.tasks = TaskSet()
        self._pool = ThreadPoolExecutor(_THREADS, "worker", initializer=_lower_priority)
        # Whether there is a thread, which then stays.
        self._threaded = False
        self._closed = False

    def begin(self) -> None:
        """Start a thread, so that all later work has one.

        Raises BridgeError: UNAVAILABLE where the system has none.
        """
        try:
            self._pool.submit(_nothing)
        except RuntimeError as error:
            raise _no_thread(error) from error
        self._threaded = True

    def run(
        self, work: Callable[[], _Result], done: Callable[[_Result | BridgeError], None]
    ) -> Future[_Result]:
        """Run ``work`` in a thread, then ``done`` on the event loop with its result or error.

        Call this on the event loop only. An exception other than BridgeError is logged and converted
        to one; UNAVAILABLE where the system has no thread for it. Cancelling the returned future prevents
        both calls.
        """
        loop = asyncio.get_running_loop()

        def finished(future: Future[_Result]) -> None:
            if not future.cancelled():
                outcome: _Result | BridgeError = _outcome(future)
                loop.call_soon_threadsafe(partial(done, outcome))

        future: Future[_Result] = Future()
        future.add_done_callback(finished)
        try:
            self._pool.submit(_finish, future, work)
            self._threaded = True
        except RuntimeError as error:
            # It waits for a thread, of which there may be none before `begin`. The next work asks again.
            if self._closed:
                raise
            if not self._threaded and future.set_running_or_notify_cancel():
                future.set_exception(_no_thread(error))
        return future

    async def outcome(self, work: Callable[[], _Result]) -> _Result | BridgeError:
        """Run ``work`` as `run` does; returns its result or error."""
        result: asyncio.Future[_Result | BridgeError] = asyncio.get_running_loop().create_future()

        def end(outcome: _Result | BridgeError) -> None:
            if not result.done():
                result.set_result(outcome)

        self.run(work, end)
        return await result

    def close(self) -> None:
        """Wait for the work in progress; drop work that has not begun."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)


async def repeat(
    what: str, seconds: float, step: Callable[[], Coroutine[Any, Any, object]]
) -> NoReturn:
    """Take a step after every ``seconds``, until cancelled; ``what`` names the steps in the log.

    A step that fails by a bug of gpubridge does not end them: each new error is logged.
    """
    told = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            await step()
        except Exception as error:  # noqa: BLE001  (a bug of ours is logged)
            if repr(error) != told:
                told = repr(error)
                failure = request_error(error, what)
                if not isinstance(failure, InternalError):
                    _logger.warning("a %s failed: %s", what, failure.message)


class TaskSet:
    """Running tasks; the event loop holds only weak references to them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finished(self) -> None:
        """Wait for all tasks, including those started meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _outcome(future: Future[_Result]) -> _Result | BridgeError:
    error = future.exception()
    if error is None:
        return future.result()
    reported = request_error(cast(Exception, error))
    # The frames of a traceback would hold the request's memory.
    error.__traceback__ = None
    return reported.copy() if reported is error else reported


def _nothing() -> None:
    """Do the work of `Workers.begin`."""


def _finish(future: Future[_Result], work: Callable[[], _Result]) -> None:
    """Do the work of a future that has not been ended meanwhile."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (of the future)
        future.set_exception(error)
    else:
        future.set_result(result)


def _no_thread(error: RuntimeError) -> BridgeError:
    return unavailable(
        f"the server has no thread for this: {error}; try again later, or raise the limit of its "
        "processes (ulimit -u, or that of its container)"
    )


def _lower_priority() -> None:
    # Linux applies the priority to one thread when given a thread id.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
