"""Chunked and compressed request bodies, and compression of responses.

Small bodies are handled at once, large ones in pieces by worker threads, a few bodies at a time. A
decompressed body is charged to its connection as it grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.workers import TaskSet, Workers
from gpubridge.errors import BridgeError
from gpubridge.frontend.answer_texts import charged
from gpubridge.frontend.coding import Inflater, compress
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.host_shm import LARGE_BYTES, Body, Budget, PrivateBytes

_AT_ONCE = 256 * 1024
"""Bytes of a body that the event loop decompresses: about a millisecond."""
_PACKED_AT_ONCE = 64 * 1024
"""Bytes of a response that the event loop compresses, which takes ten times as long."""
_PIECE = 1 << 20
_BODIES = 4
"""Bodies decompressed concurrently."""


class CodedBodies:
    """Decompresses request bodies and compresses responses, for all connections.

    - ``limit``: bytes of a decompressed body.
    - ``budget``: charged for compressed responses.

    Attribute ``tasks``: the unfinished work of workers.
    """

    def __init__(self, limit: int, workers: Workers, budget: Budget) -> None:
        self._limit = limit
        self._budget = budget
        self._workers = workers
        self._turns = asyncio.Semaphore(_BODIES)
        self.tasks = TaskSet()

    def unpack(
        self, exchange: HttpExchange, body: bytearray, then: Callable[[HttpExchange, int], None]
    ) -> None:
        """Decompress a body into the memory of its handler; an error is the response.

        ``then``: called with the exchange and the size of the body.
        """
        collected: CollectedBody = exchange.handler
        coding = exchange.field(b"content-encoding")
        try:
            inflater = Inflater(b"identity" if coding is None else coding, body, self._limit)
            first = inflater.read(_AT_ONCE)
            if inflater.finished:
                if first:
                    collected.memory(len(first))[:] = first
                collected.hand_over(exchange)
        except BridgeError as error:
            exchange.give_up(error)
            return
        if inflater.finished:
            then(exchange, len(first))
        else:
            work = partial(self._unpack, exchange, collected, inflater, first, then)
            collected.work = self._start(exchange, work)

    def pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        parts: Sequence[bytes | memoryview],
    ) -> None:
        """Send a response with the coding that the client accepts."""
        coding = exchange.coding
        assert coding is not None
        fields += b"Content-Encoding: %b\r\n" % coding.encode()
        if sum(len(part) for part in parts) <= _PACKED_AT_ONCE:
            exchange.respond(status, fields, compress(coding, parts), plain=True)
        else:
            self._start(exchange, partial(self._pack, exchange, status, fields, coding, parts))

    async def _unpack(
        self,
        exchange: HttpExchange,
        collected: CollectedBody,
        inflater: Inflater,
        first: bytes,
        then: Callable[[HttpExchange, int], None],
    ) -> None:
        async with self._turns:
            pieces = [first]
            length = len(first)
            while not exchange.lost and pieces[-1]:
                collected.unpacked(length)
                piece = await self._workers.outcome(partial(inflater.read, _PIECE))
                if isinstance(piece, BridgeError):
                    # Not raised: its traceback would keep the pieces until garbage collection.
                    exchange.give_up(piece)
                    return
                pieces.append(piece)
                length += len(piece)
            if exchange.lost:
                return
            memory = collected.memory(length)
            at = 0
            # Not in a worker: the handler may free its memory between two pieces.
            for piece in pieces:
                memory[at : at + len(piece)] = piece
                at += len(piece)
                await asyncio.sleep(0)
                if exchange.lost:
                    return
            collected.hand_over(exchange)
        then(exchange, length)

    async def _pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        coding: str,
        parts: Sequence[bytes | memoryview],
    ) -> None:
        packed = await self._workers.outcome(partial(compress, coding, parts))
        body = packed if isinstance(packed, BridgeError) else charged(self._budget, [packed])
        del packed
        if isinstance(body, BridgeError):
            exchange.fail(body)
        else:
            exchange.respond(status, fields, b"", body, plain=True)

    def _start(
        self, exchange: HttpExchange, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work()
            except BridgeError as error:
                exchange.give_up(error)

        return self.tasks.start(run())


class CollectedBody:
    """Stands in for a handler while a chunked or compressed body is received.

    ``new_body``: returns the charge of large memory.

    Attribute ``work``: decompresses the body; cancelled when the request is dropped.
    """

    def __init__(self, handler: RequestHandler, new_body: Callable[[], Body]) -> None:
        self._handler = handler
        self._new_body = new_body
        self._bytes: PrivateBytes | None = None
        self._collected = 0
        self.work: asyncio.Task[None] | None = None

    def grow(self, arrived: int) -> int:
        """Return how many bytes of the body may be received."""
        self._collected = arrived + _PIECE
        self._charge().count(self._collected)
        return self._collected

    def unpacked(self, nbytes: int) -> None:
        """Charge so many decompressed bytes as well, and the next piece."""
        charge = self._charge()
        charge.count(self._collected + nbytes + _PIECE)
        charge.check_unpacked(nbytes, self._collected)

    def memory(self, nbytes: int) -> memoryview:
        """Return the handler's memory for the decompressed body."""
        handler = self._handler
        if nbytes <= LARGE_BYTES:
            return memoryview(handler.body_memory(nbytes, None))
        body = self._new_body()
        try:
            memory = handler.body_memory(nbytes, body)
        except BridgeError:
            body.release()
            raise
        handler.grow(nbytes)
        return memoryview(memory)

    def hand_over(self, exchange: HttpExchange) -> None:
        """Let the handler continue: it has the body."""
        self._release()
        exchange.handler = self._handler

    def abort(self) -> None:
        """Drop the request, which will not be completed."""
        self._release()
        if self.work is not None:
            self.work.cancel()
        self._handler.abort()

    def _charge(self) -> PrivateBytes:
        if self._bytes is None:
            self._bytes = PrivateBytes(self._new_body())
        return self._bytes

    def _release(self) -> None:
        counted, self._bytes = self._bytes, None
        if counted is not None:
            counted.close()
