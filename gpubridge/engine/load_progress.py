"""Progress of loads, for the log and the status document."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_logger = logging.getLogger(__name__)

Report = Callable[[], tuple[str, float | None]]
"""Returns the step of a load in words, and the part of it that is done, if that is known."""


@dataclass(slots=True, eq=False)
class Load:
    """A load in progress.

    - ``version``: 0 while the versions are not known.
    - ``since``: when it began, of the monotonic clock.
    - ``report``: returns its present step.
    """

    model: str
    version: int
    since: float
    report: Report

    def __str__(self) -> str:
        name = f"model '{self.model}'" + (f" version {self.version}" if self.version else "")
        step, part = self.report()
        done = "" if part is None else f" ({100 * part:.0f} %)"
        return f"{name} has been loading for {time.monotonic() - self.since:.0f} s: {step}{done}"


class LoadProgress:
    """The loads in progress; each is logged every ``every`` seconds."""

    def __init__(self, every: float = 5.0) -> None:
        self.loads: list[Load] = []
        self._every = every

    @contextmanager
    def track(self, model: str, version: int, report: Report) -> Iterator[None]:
        """List and log a load for as long as the block runs."""
        load = Load(model, version, time.monotonic(), report)
        timer = asyncio.get_running_loop().create_task(self._log(load))
        token = _LOAD.set(load)
        self.loads.append(load)
        try:
            yield
        finally:
            self.loads.remove(load)
            _LOAD.reset(token)
            timer.cancel()

    async def _log(self, load: Load) -> None:
        while True:
            await asyncio.sleep(self._every)
            _logger.info("%s", load)


@contextmanager
def load_step(report: Report) -> Iterator[None]:
    """Report another step of the present task's load for as long as the block runs."""
    load = _LOAD.get()
    if load is None:
        yield
        return
    before, load.report = load.report, report
    try:
        yield
    finally:
        load.report = before


def readable_size(nbytes: int) -> str:
    """Format a number of bytes."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


_LOAD: ContextVar[Load | None] = ContextVar("_LOAD", default=None)
