"""The status document: built when it is asked for, once a second at most, and shared by all who ask.

Building takes turns with the event loop's other work, and memory is measured in a worker thread, so that
inference goes on meanwhile. A document is built only for a request; without one, a timer of the history reads
counters every ten seconds, and nothing else is done.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from pathlib import Path

import orjson

import gpubridge
from gpubridge.dataplane import HttpExchange
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.model_index import VersionStatus
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.engine.workers import Workers
from gpubridge.frontend.coding import compress
from gpubridge.frontend.control import JSON, Answer, ControlCall, ControlTasks
from gpubridge.frontend.status.history import StatusHistory
from gpubridge.frontend.status.rows import (
    SLOWEST,
    Row,
    load_row,
    machine_row,
    model_row,
    row_key,
    slow_rows,
    unix_time,
)
from gpubridge.telemetry.statistics import ModelStatistics

STATUS_PATH = b"/v2/gpubridge/status"
SCHEMA = 1
"""Changes when a field changes its meaning or goes away."""

_FRESH_SECONDS = 1.0
_ROWS_A_TURN = 48
_MEASURING_SECONDS = 0.003
_PACKED_BYTES = 4096
_DIFFERENCES = 8
"""Documents after which clients can ask for what has changed."""

_LONGEST_KEPT_MS = 120_000
"""After this time a row is made again in any case: the slowest requests of the last minutes change."""

_AFTER = re.compile(rb"after=([0-9]{1,18})")
_WITH_HISTORY = b"history=1"
_HEADERS = JSON + b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"


class ProcessMemory:
    """Memory of processes, as the kernel tells it; the longest unmeasured are measured first."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def measure(self, pids: Sequence[int]) -> None:
        """Measure processes for a moment, at least one; forget those that are not among ``pids``.

        Reading the proportional size takes the kernel as long as the process is large.
        """
        old = self.rows
        rows = {pid: old[pid] for pid in pids if pid in old}
        until = time.monotonic() + _MEASURING_SECONDS
        for pid in sorted(pids, key=lambda pid: rows[pid]["measured"] if pid in rows else 0.0):
            with suppress(OSError, ValueError, KeyError):
                rows[pid] = _memory(pid)
            if time.monotonic() > until:
                break
        self.rows = rows


def _memory(pid: int) -> Row:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    sizes = {line[0]: int(line[1]) << 10 for line in map(str.split, text.splitlines()[1:])}
    return {
        "rss_bytes": sizes["Rss:"],
        "pss_bytes": sizes["Pss:"],
        "measured": unix_time(time.monotonic()),
    }


@dataclass(slots=True)
class _KeptRow:
    """The row of a model version, until something in it changes.

    ``number``: the first document that has it so.
    """

    key: object
    number: int
    text: bytes
    slow: list[Row]


class StatusDocument:
    """Builds the status document, and keeps what has not changed of it.

    - ``ready``: returns whether the server is ready.
    - ``sends``: whether the page may send inference requests.

    Attributes: ``endpoints``, rows of the open endpoints, by name; ``history``, what models did before.
    """

    def __init__(
        self,
        repository: ModelRepository,
        regions: ClientRegions,
        workers: Workers,
        ready: Callable[[], bool],
        *,
        sends: bool,
    ) -> None:
        self.endpoints: dict[str, Row] = {}
        self.history = StatusHistory(repository.running)
        self._sends = sends
        self._repository = repository
        self._regions = regions
        self._workers = workers
        self._ready = ready
        self._memory = ProcessMemory()
        self._head = b""
        self._rows: dict[tuple[str, int], _KeptRow] = {}
        # Numbers of the latest documents, of which none is older than the last change of what is listed.
        self._numbers: deque[int] = deque(maxlen=_DIFFERENCES)
        self._built = -_FRESH_SECONDS
        self._tasks = ControlTasks()
        self._building: asyncio.Task[None] | None = None
        self._answers: dict[tuple[int, bool, bool], asyncio.Task[Answer]] = {}

    def open(self, head: HttpExchange) -> ControlCall:
        """Return the handler of a request for the document."""
        packs = head.coding == "gzip"
        query = head.target.partition(b"?")[2]
        asked = _AFTER.fullmatch(query)
        after, past = 0 if asked is None else int(asked[1]), query == _WITH_HISTORY
        return ControlCall(lambda _: self._answer(after, past=past, packs=packs), self._tasks)

    async def _answer(self, after: int, *, past: bool, packs: bool) -> Answer:
        """Return the document; only what changed after an earlier one, if that is known.

        ``past``: with the history.
        """
        loop = asyncio.get_running_loop()
        if time.monotonic() - self._built >= _FRESH_SECONDS:
            if self._building is None:
                self._building = loop.create_task(self._build())
            await self._building
        key = after if after in self._numbers else 0, past, packs
        made = self._answers.get(key)
        if made is None:
            made = self._answers[key] = loop.create_task(self._make(*key))
        return await made

    async def _make(self, after: int, past: bool, packs: bool) -> Answer:
        rows = [row.text for row in self._rows.values() if row.number > after]
        history = b',"history":%b' % self.history.encoded() if past else b""
        about = b'%b,"complete":%b,"models":[' % (history, b"false" if after else b"true")
        body = b"".join([self._head[:-1], about, b",".join(rows), b"]}"])
        if not packs or len(body) < _PACKED_BYTES:
            return Answer(body, _HEADERS)
        packed = await self._workers.outcome(lambda: compress("gzip", [body], 1))
        if isinstance(packed, Exception):
            raise packed
        return Answer(packed, _HEADERS + b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n")

    async def _build(self) -> None:
        try:
            models = self._repository.running()
            await self._workers.outcome(partial(self._memory.measure, _pids(models)))
            number = time.time_ns() // 1_000_000
            rows = await self._collect(models, number)
            if rows.keys() != self._rows.keys():
                self._numbers.clear()
            self._numbers.append(number)
            self._rows = rows
            slow = (each for row in rows.values() for each in row.slow)
            slowest = nlargest(SLOWEST, slow, key=itemgetter("request_us"))
            about = {**self._server(), "number": number, "slowest": slowest}
            self._head = orjson.dumps(about)
            self._answers.clear()
            self._built = time.monotonic()
        finally:
            self._building = None

    async def _collect(
        self, models: Sequence[Model], number: int
    ) -> dict[tuple[str, int], _KeptRow]:
        """Return the rows of all versions, in turns with the event loop's other work."""
        # Behind the served ones are former ones that complete their requests.
        running = {(model.name, model.version): model for model in reversed(models)}
        rows = {}
        index = iter(enumerate(self._repository.index()))
        while some := list(islice(index, _ROWS_A_TURN)):
            for place, status in some:
                name = status.name, status.version
                rows[name] = self._row(status, running.get(name), number, place)
            await asyncio.sleep(0)
        return rows

    def _row(self, status: VersionStatus, model: Model | None, number: int, place: int) -> _KeptRow:
        memory = self._memory.rows
        key = status, row_key(model, memory), (number + 1000 * place) // _LONGEST_KEPT_MS
        kept = self._rows.get((status.name, status.version))
        if kept is not None and kept.key == key and (model is None or not model.pending):
            return kept
        slow = [] if model is None else slow_rows(model)
        return _KeptRow(key, number, orjson.dumps(model_row(status, model, memory, slow)), slow)

    def _server(self) -> Row:
        repository = self._repository
        return {
            "schema": SCHEMA,
            "time": unix_time(time.monotonic()),
            "server": {
                "name": repository.server_id,
                "version": gpubridge.__version__,
                "python": sys.version.split()[0],
                "pid": os.getpid(),
                "started": self.history.began,
                "live": True,
                "ready": self._ready(),
                "sends": self._sends,
                "endpoints": self.endpoints,
                "memory": self._memory.rows.get(os.getpid()),
            },
            "machine": machine_row(repository.telemetry.machine.families()),
            "loads": [load_row(load) for load in repository.progress.loads],
            "regions": list(self._described_regions()),
            "duration_bounds_us": [bound / 1000 for bound in ModelStatistics.duration_bounds],
        }

    def _described_regions(self) -> Iterable[Row]:
        for on_device in (False, True):
            for region in self._regions.status(on_device=on_device):
                yield {**region.described(), "uses": region.uses}


def _pids(models: Iterable[Model]) -> list[int]:
    """Return the process ids of the server and the stubs."""
    pids = [os.getpid()]
    for model in models:
        for instance in model.instances:
            run = instance.run
            if run is not None and run.process is not None:
                pids.append(run.process.pid)
    return pids
