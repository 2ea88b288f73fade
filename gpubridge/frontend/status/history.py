"""History of the last fifteen minutes of each model, in steps of ten seconds.

The sums that the data plane counts anyway are read by a timer, on the event loop, in turns with its other work.
A model in which nothing is done costs a comparison; one that is always in use costs a difference as JSON every
ten seconds (200 to 500 bytes, the more the wider its durations are spread), so 30 to 55 KiB in all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson

from gpubridge.engine.models.model import Model
from gpubridge.engine.workers import repeat
from gpubridge.frontend.status.rows import Row, done_key, sums_row, unix_time

KEPT_SECONDS = 900.0
_STEP_SECONDS = 10.0
_MODELS_A_TURN = 48


@dataclass(slots=True)
class _Past:
    """The past of one model version.

    - ``since``: when its sums began, which tells one load from the next.
    - ``sums``: the sums at the last step in which something was done, as JSON; empty before the first.
    - ``steps``: the end of each step in which something was done, and its row as JSON.
    """

    since: float
    key: object = None
    sums: bytes = b""
    steps: list[tuple[float, bytes]] = field(default_factory=list)

    def add(self, model: Model, begin: float, end: float) -> None:
        """Take a step of ``model`` in, and let go of those that are too old."""
        steps = self.steps
        while steps and steps[0][0] <= end - KEPT_SECONDS:
            del steps[0]
        key = done_key(model.statistics)
        if key == self.key or not any(key):
            return
        self.key = key
        sums = sums_row(model)
        before = orjson.loads(self.sums) if self.sums else {}
        about = {"begin": begin, "end": end, **_difference(sums, before)}
        steps.append((end, orjson.dumps(about)))
        self.sums = orjson.dumps(sums)


class StatusHistory:
    """The past of all model versions, since ``began``.

    ``running`` returns the models, draining ones last.
    """

    def __init__(self, running: Callable[[], Sequence[Model]]) -> None:
        self._running = running
        self._pasts: dict[tuple[str, int], _Past] = {}
        self.began = self._last = unix_time(time.monotonic())
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Take steps from now on, until `close`."""
        keep = repeat("step of the history", _STEP_SECONDS, self._keep)
        self._task = asyncio.get_running_loop().create_task(keep)

    def close(self) -> None:
        """Take no more steps."""
        if self._task is not None:
            self._task.cancel()

    async def _keep(self) -> None:
        await self.step(unix_time(time.monotonic()))

    async def step(self, now: float) -> None:
        """Take in what was done since the last step, and forget models that are gone."""
        # Behind the served ones are former ones that complete their requests.
        running = {(model.name, model.version): model for model in reversed(self._running())}
        begin, self._last = self._last, now
        pasts: dict[tuple[str, int], _Past] = {}
        rest = iter(running.items())
        while some := list(islice(rest, _MODELS_A_TURN)):
            for name, model in some:
                past, since = self._pasts.get(name), model.statistics.since
                if past is None or past.since != since:
                    past = _Past(since)
                past.add(model, max(begin, since), now)
                pasts[name] = past
            await asyncio.sleep(0)
        self._pasts = pasts

    def encoded(self) -> bytes:
        """Return the history as JSON; models that were never used are left out."""
        about = orjson.dumps(max(self.began, self._last - KEPT_SECONDS))
        return b'{"begin":%b,"models":[%b]}' % (about, b",".join(self._rows()))

    def _rows(self) -> Iterator[bytes]:
        for (name, version), past in self._pasts.items():
            if past.sums:
                about = orjson.dumps({"name": name, "version": version, "since": past.since})
                steps = b",".join(row for _, row in past.steps)
                yield b'%b,"sums":%b,"steps":[%b]}' % (about[:-1], past.sums, steps)


def _difference(now: Row, before: Row) -> Row:
    """Return what has been added to sums, without zeros."""
    found = {name: _added(value, before.get(name)) for name, value in now.items()}
    return {name: value for name, value in found.items() if value}


def _added(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return _difference(now, before or {})
    if isinstance(now, list):
        # Pairs of a bucket and its count.
        old = dict(before or ())
        return [(key, count - old.get(key, 0)) for key, count in now if count != old.get(key)]
    return now - (before or 0)
