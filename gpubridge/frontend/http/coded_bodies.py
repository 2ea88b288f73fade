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
from gpubridge.errors import BridgeError
from gpubridge.frontend.coding import Inflater, compress
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.frontend.workers import Workers

__all__ = ["CodedBodies"]

_AT_ONCE = 256 * 1024
"""Bytes of a body that are unpacked on the event loop: about a millisecond."""
_PACKED_AT_ONCE = 64 * 1024
"""Likewise for answers, which take ten times as long."""
_PIECE = 1 << 20
_BODIES = 4
"""Bodies that are unpacked at a time."""


class CodedBodies:
    """Unpacks the bodies of requests, and packs answers, for any number of connections.

    Parameters
    ----------
    limit : int
        Bytes of a body without its coding.
    workers : Workers
        Do what is heavy.
    """

    def __init__(self, limit: int, workers: Workers) -> None:
        self._limit = limit
        self._workers = workers
        self._turns = asyncio.Semaphore(_BODIES)
        self._tasks: set[asyncio.Task[None]] = set()

    def unpack(
        self, exchange: HttpExchange, body: bytearray, then: Callable[[HttpExchange, int], None]
    ) -> None:
        """Put a body where its handler wants it, then tell so; what is wrong with it is the answer.

        Parameters
        ----------
        body : bytearray
            As it came.
        then : callable
            Told the bytes of the body.
        """
        coding = exchange.field(b"content-encoding")
        try:
            inflater = Inflater(b"identity" if coding is None else coding, body, self._limit)
            first = inflater.read(_AT_ONCE)
            if inflater.finished and first:
                _memory(exchange, len(first))[:] = first
        except BridgeError as error:
            _fail(exchange, error)
            return
        if inflater.finished:
            then(exchange, len(first))
        else:
            self._start(exchange, self._unpack(exchange, inflater, first, then))

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
        inflater: Inflater,
        first: bytes,
        then: Callable[[HttpExchange, int], None],
    ) -> None:
        async with self._turns:
            pieces = [first]
            exchange.weigh(len(first))
            while not exchange.lost and pieces[-1]:
                piece = await self._by_worker(partial(inflater.read, _PIECE))
                if isinstance(piece, BridgeError):
                    # Not raised: its traceback would hold the pieces until the next collection.
                    _fail(exchange, piece)
                    return
                pieces.append(piece)
                exchange.weigh(len(piece))
            if exchange.lost:
                return
            length = sum(len(piece) for piece in pieces)
            memory = _memory(exchange, length)
            at = 0
            # Here, and not by a worker: the handler may give its memory back between two pieces.
            for piece in pieces:
                memory[at : at + len(piece)] = piece
                at += len(piece)
                await asyncio.sleep(0)
                if exchange.lost:
                    return
        then(exchange, length)

    async def _pack(
        self,
        exchange: HttpExchange,
        status: int,
        fields: bytes,
        coding: str,
        parts: Sequence[bytes | memoryview],
    ) -> None:
        packed = await self._by_worker(partial(compress, coding, parts))
        if isinstance(packed, BridgeError):
            exchange.fail(packed)
        else:
            exchange.respond(status, fields, packed, plain=True)

    async def _by_worker(self, work: Callable[[], bytes]) -> bytes | BridgeError:
        result: asyncio.Future[bytes | BridgeError] = asyncio.get_running_loop().create_future()
        self._workers.run(work, result.set_result)
        return await result

    def _start(self, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except BridgeError as error:
                _fail(exchange, error)

        task = asyncio.get_running_loop().create_task(run())
        # The loop alone would not keep it alive.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _memory(exchange: HttpExchange, nbytes: int) -> memoryview:
    handler: RequestHandler = exchange.handler
    return handler.body_memory(nbytes)


def _fail(exchange: HttpExchange, error: BridgeError) -> None:
    """Answer a request that its handler will not see whole."""
    handler = exchange.handler
    if handler is not None:
        handler.abort()
    exchange.fail(error)
