"""The server's thread that calls the driver, and whose results its event loop waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from gpubridge.cuda_ipc import DriverThread

_Result = TypeVar("_Result")


class ServerDriverThread(DriverThread):
    """Gives futures of the calls, too."""

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return a future of what the work returns or raises; cancelled in time, it does not begin."""
        # No frame that an error passes may hold the future: a cycle would keep memory.
        future: Future[_Result] = Future()
        self.submit(partial(_complete, future, work))
        return asyncio.wrap_future(future)


def _complete(future: Future[_Result], work: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
        future.set_exception(error)
        # So may this one not.
        del future
