"""Progress of loads, for the log and the status document."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gpubridge.engine.workers import repeat

_logger = logging.getLogger(__name__)

_MANY = 20
"""Loads at once that have no lines of their own."""
_TOLD = 3
"""Loads that each have a line about their progress."""
_LONG = 0.8
"""Part of the time between two of these lines that a load has taken by its first."""

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
    """The loads in progress; those that take long are logged every ``every`` seconds, many of them in one line.

    Attribute ``level``: of the lines that each load has at its begin and its end.
    """

    def __init__(self, every: float = 5.0) -> None:
        self.loads: list[Load] = []
        self.level = logging.INFO
        self._every = every
        self._timer: asyncio.Task[None] | None = None

    def expect(self, models: int) -> None:
        """Have so many loads at once log no lines of their own, if they are many."""
        many = models > _MANY
        if many and self.level == logging.INFO:
            _logger.info("many models are loaded: --log-verbose=1 has a line for each")
        self.level = logging.DEBUG if many else logging.INFO

    @contextmanager
    def track(self, model: str, version: int, report: Report) -> Iterator[None]:
        """List and log a load for as long as the block runs."""
        load = Load(model, version, time.monotonic(), report)
        token = _LOAD.set(load)
        self.loads.append(load)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().create_task(
                repeat("line on loads", self._every, self._log)
            )
        try:
            yield
        finally:
            self.loads.remove(load)
            _LOAD.reset(token)
            if not self.loads and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _log(self) -> None:
        before = time.monotonic() - _LONG * self._every
        long = [load for load in self.loads if load.since <= before]
        if len(long) <= _TOLD:
            for load in long:
                _logger.info("%s", load)
        else:
            _logger.info("%d models are being loaded, of which %s", len(long), long[0])


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
