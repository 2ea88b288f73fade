"""The server's thread that calls the driver: what it is given is done in that order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class DriverThread:
    """Runs one call after the other on a thread of its own, which sleeps while there is none."""

    def __init__(self) -> None:
        # Its `put` takes no lock that an interrupted `put` could hold: for finalizers.
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return a future of what the work returns or raises; cancelled in time, it does not begin."""
        # No frame that an error passes may hold the future: a cycle would keep memory.
        future: Future[_Result] = Future()
        self._queue.put(partial(_complete, future, work))
        return asyncio.wrap_future(future)

    def submit(self, work: Callable[[], object]) -> None:
        """Do something later, of which nobody hears; finalizers may call this, on any thread."""
        self._queue.put(work)

    def close(self) -> None:
        """End the thread when it has done what it was given; what comes later is not done."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                _logger.exception("a call of the driver failed")
            # What it refers to may be the last of some memory.
            del work


def _complete(future: Future[_Result], work: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
        future.set_exception(error)
        # So may this one not.
        del future
