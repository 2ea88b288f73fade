"""Bodies that come in chunks or with a coding, and answers that get one.

What is small is done at once. The rest is done in pieces by worker threads, a few bodies at a time:
what a body becomes is held until it is whole, and counts against its connection as it grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.workers import TaskSet, Workers
from gpubridge.errors import BridgeError
from gpubridge.frontend.coding import Inflater, compress
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.host_shm import LARGE_BYTES, Body, PrivateBytes

_AT_ONCE = 256 * 1024
"""Bytes of a body that are unpacked on the event loop: about a millisecond."""
_PACKED_AT_ONCE = 64 * 1024
"""Likewise for answers, which take ten times as long."""
_PIECE = 1 << 20
_BODIES = 4
"""Bodies that are unpacked at a time."""


class CodedBodies:
    """Unpacks the bodies of requests, and packs answers, for any number of connections.

    ``limit``: bytes of a body without its coding.
    """

    def __init__(self, limit: int, workers: Workers) -> None:
        self._limit = limit
        self._workers = workers
        self._turns = asyncio.Semaphore(_BODIES)
        self._tasks = TaskSet()

    def unpack(
        self, exchange: HttpExchange, body: bytearray, then: Callable[[HttpExchange, int], None]
    ) -> None:
        """Put a body where its handler wants it, then tell so; what is wrong with it is the answer.

        ``then``: told the bytes of the body.
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
            self._start(exchange, self._unpack(exchange, collected, inflater, first, then))

    def pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        parts: Sequence[bytes | memoryview],
    ) -> None:
        """Send an answer with the coding that the client accepts."""
        coding = exchange.coding
        assert coding is not None
        fields += b"Content-Encoding: %b\r\n" % coding.encode()
        if sum(len(part) for part in parts) <= _PACKED_AT_ONCE:
            exchange.respond(status, fields, compress(coding, parts), plain=True)
        else:
            self._start(exchange, self._pack(exchange, status, fields, coding, parts))

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
            exchange.weigh(length)
            while not exchange.lost and pieces[-1]:
                collected.unpacked(length + _PIECE)
                piece = await self._workers.outcome(partial(inflater.read, _PIECE))
                if isinstance(piece, BridgeError):
                    # Not raised: its traceback would hold the pieces until the next collection.
                    exchange.give_up(piece)
                    return
                pieces.append(piece)
                length += len(piece)
                exchange.weigh(len(piece))
            if exchange.lost:
                return
            memory = collected.memory(length)
            at = 0
            # Here, and not by a worker: the handler may give its memory back between two pieces.
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
        if isinstance(packed, BridgeError):
            exchange.fail(packed)
        else:
            exchange.respond(status, fields, packed, plain=True)

    def _start(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except BridgeError as error:
                exchange.give_up(error)

        self._tasks.start(run())


class CollectedBody:
    """Takes a body in chunks or with a coding in the place of its request's handler.

    ``new_body``: returns what large memory is charged to.
    """

    def __init__(self, handler: RequestHandler, new_body: Callable[[], Body]) -> None:
        self._handler = handler
        self._new_body = new_body
        self._bytes: PrivateBytes | None = None
        self._collected = 0

    def grow(self, arrived: int) -> int:
        """Return how much of the body may come."""
        self._collected = arrived + _PIECE
        self._count(self._collected)
        return self._collected

    def unpacked(self, nbytes: int) -> None:
        """Count so many bytes of what the body becomes, too."""
        self._count(self._collected + nbytes)

    def memory(self, nbytes: int) -> memoryview:
        """Return the handler's memory for the body as it has become."""
        handler = self._handler
        if nbytes <= LARGE_BYTES:
            return handler.body_memory(nbytes, None)
        body = self._new_body()
        try:
            memory = handler.body_memory(nbytes, body)
        except BridgeError:
            body.release()
            raise
        handler.grow(nbytes)
        return memory

    def hand_over(self, exchange: HttpExchange) -> None:
        """Let the handler go on, which has the body."""
        self._release()
        exchange.handler = self._handler

    def abort(self) -> None:
        """The request will not be completed."""
        self._release()
        self._handler.abort()

    def _count(self, nbytes: int) -> None:
        if self._bytes is None:
            self._bytes = PrivateBytes(self._new_body())
        self._bytes.count(nbytes)

    def _release(self) -> None:
        counted, self._bytes = self._bytes, None
        if counted is not None:
            counted.close()
