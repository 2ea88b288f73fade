"""The text of the metrics: built for all who wait for it at once, and compressed once for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.workers import Workers
from gpubridge.frontend.coding import compress
from gpubridge.frontend.control import Answer, ControlCall, ControlTasks
from gpubridge.telemetry.exposition import CONTENT_TYPE

_FIELDS = b"Content-Type: %b\r\n" % CONTENT_TYPE.encode()
_PACKED_FIELDS = _FIELDS + b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n"
_PACKED_BYTES = 1024
_SHARE = 20
"""Of the event loop's time, building takes at most this part."""
_LONGEST_GAP_SECONDS = 1.0


class _Text:
    """A text, and its compressed form, which is made once, when it is first asked for."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.packing: asyncio.Task[bytes | Exception] | None = None


class MetricsText:
    """Builds the text of the metrics when it is asked for.

    Each answer is built after its request came, so that it counts all that was answered before. Many who ask
    wait for the same text, and for a while after the one before: twenty times as long as that took, at most
    a second.

    ``build``: returns the text.
    """

    def __init__(self, build: Callable[[], bytes], workers: Workers) -> None:
        self._build = build
        self._workers = workers
        self._tasks = ControlTasks()
        self._next = 0.0
        self._awaited: asyncio.Task[_Text] | None = None

    def open(self, head: HttpExchange) -> ControlCall:
        """Return the handler of a request for the text."""
        packs = head.coding == "gzip"
        return ControlCall(lambda _: self.answer(packs=packs), self._tasks)

    async def answer(self, *, packs: bool) -> Answer:
        """Return the next text; ``packs``: compressed, if it is long."""
        if self._awaited is None:
            self._awaited = asyncio.get_running_loop().create_task(self._make())
        made = await self._awaited
        if not packs or len(made.text) < _PACKED_BYTES:
            return Answer(made.text, _FIELDS, plain=False)
        if made.packing is None:
            pack = self._workers.outcome(lambda: compress("gzip", [made.text], 1))
            made.packing = asyncio.get_running_loop().create_task(pack)
        packed = await made.packing
        if isinstance(packed, Exception):
            raise packed
        return Answer(packed, _PACKED_FIELDS)

    async def _make(self) -> _Text:
        await asyncio.sleep(self._next - time.monotonic())
        # Who asks from now on waits for the next one.
        self._awaited = None
        began = time.monotonic()
        text = self._build()
        ended = time.monotonic()
        self._next = ended + min(_SHARE * (ended - began), _LONGEST_GAP_SECONDS)
        return _Text(text)
