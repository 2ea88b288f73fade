"""Encoding and compression of gRPC messages.

Small messages are handled at once, large ones by worker threads, a few messages at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO

from gpubridge.config import CompressionLevel
from gpubridge.dataplane import HeaderFields
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.answer_texts import charged
from gpubridge.frontend.coding import Inflater, compress
from gpubridge.frontend.grpc.status import RESPONSE_FIELDS, CallFailed, Status
from gpubridge.host_shm import Account, Body, Budget, PrivateBytes
from gpubridge.protocol.grpc.infer_request import FormCache, KnownRequest
from gpubridge.protocol.grpc.infer_response import FrameSegments, encode_response
from gpubridge.protocol.grpc.receiver import RequestReceiver
from gpubridge.protocol.request_form import classes_of
from gpubridge.protocol.response_encoding import classified_bytes
from gpubridge.request import InferResponse, Outcome
from gpubridge.telemetry.logs import request_error

PREFIX = 5
"""Bytes before each message: a flag and its length."""

_ZLIB_LEVELS: dict[CompressionLevel, int] = {"low": 1, "medium": 6, "high": 9}
_AT_ONCE = 256 * 1024
"""Bytes of a message that the event loop decompresses: about a millisecond."""
_PACKED_AT_ONCE = 64 * 1024
"""Bytes of a response that the event loop compresses, which takes ten times as long."""
PIECE = 1 << 20
"""Bytes of a long message handled at a time."""
_MESSAGES = 4
"""Messages decompressed concurrently."""

Failed = BridgeError | CallFailed


class Packing:
    """Compression of response messages."""

    def __init__(self, coding: str, level: int) -> None:
        self._coding = coding
        self._level = level
        fields = (*RESPONSE_FIELDS, (b"grpc-encoding", coding.encode()))
        self.headers = HeaderFields(fields, repeat=True)

    def frame(self, segments: FrameSegments) -> FrameSegments:
        """Return a frame with its message compressed, or unchanged if that is not shorter."""
        parts = list(_without_prefix(segments))
        length = sum(len(part) for part in parts)
        packed = compress(self._coding, parts, self._level)
        if len(packed) >= length:
            return segments
        return [b"\1%b%b" % (len(packed).to_bytes(PREFIX - 1, "big"), packed)]


class MessageCoder:
    """Decompresses and parses request messages, encodes and compresses responses, for all calls.

    ``budget``: charged for decompressed messages and compressed responses.
    """

    def __init__(self, workers: Workers, budget: Budget) -> None:
        self._workers = workers
        self._budget = budget
        self._turns = asyncio.Semaphore(_MESSAGES)

    def new_body(self, account: Account, refuse: Callable[[BridgeError], None]) -> Body:
        """Return the charge of what is large; see `Body`."""
        return Body(self._budget, account, refuse)

    def unpack(
        self,
        message: bytes | memoryview,
        coding: bytes,
        limit: int,
        account: Account,
        done: Callable[[bytes | Failed], None],
    ) -> bytes | asyncio.Task[None]:
        """Return a decompressed message if it is small, else the task that passes it to ``done``.

        ``done`` also gets the error of a malformed message; the task can be cancelled.

        Raises CallFailed: INTERNAL for a malformed or too long message; UNIMPLEMENTED for an unknown
        coding.
        """
        try:
            inflater = Inflater(coding or b"identity", message, limit)
            first = inflater.read(_AT_ONCE)
        except BridgeError as error:
            raise _failed(error) from error
        if inflater.finished:
            return first
        return asyncio.get_running_loop().create_task(
            self._unpack(inflater, first, len(message), account, done)
        )

    async def _unpack(
        self,
        inflater: Inflater,
        first: bytes,
        packed: int,
        account: Account,
        done: Callable[[bytes | Failed], None],
    ) -> None:
        refusals: list[BridgeError] = []

        def refuse(error: BridgeError) -> None:
            refusals.append(error)
            counted.close()

        async with self._turns:
            counted = PrivateBytes(self.new_body(account, refuse))
            try:
                message = BytesIO()
                message.write(first)
                while not inflater.finished and not refusals:
                    counted.count(message.tell() + PIECE)
                    piece = await self._workers.outcome(partial(inflater.read, PIECE))
                    if isinstance(piece, BridgeError):
                        raise piece
                    message.write(piece)
                    counted.check_unpacked(message.tell(), packed)
                outcome: bytes | Failed = refusals[0] if refusals else message.getvalue()
            except Exception as error:
                told = request_error(error)
                outcome = told if told.code == ErrorCode.UNAVAILABLE else _failed(told)
            finally:
                counted.close()
        done(outcome)

    def read(
        self,
        receiver: RequestReceiver,
        forms: FormCache,
        done: Callable[[KnownRequest | BridgeError], None],
    ) -> asyncio.Task[None]:
        """Return the task that parses a complete long request; it can be cancelled.

        ``done`` gets the parsed request, with its inputs in their places, or an error.
        """
        return asyncio.get_running_loop().create_task(self._read(receiver, forms, done))

    async def _read(
        self,
        receiver: RequestReceiver,
        forms: FormCache,
        done: Callable[[KnownRequest | BridgeError], None],
    ) -> None:
        outcome: KnownRequest | BridgeError | None = None
        # Repeated if the model was reloaded meanwhile.
        while outcome is None:
            read = await self._workers.outcome(partial(receiver.read, forms))
            if isinstance(read, BridgeError):
                outcome = read
                break
            try:
                outcome = forms.known(read)
                copy = None if outcome is None else receiver.copy(outcome)
                if outcome is not None and copy is not None:
                    receiver.move(await copy.run_in_turns(), outcome)
                    outcome = forms.known(read)
            except Exception as error:
                # Without the traceback, which would keep the message until garbage collection.
                outcome = request_error(error).copy()
        done(outcome)

    def frame(
        self,
        known: KnownRequest,
        identifier: str,
        outcome: Outcome,
        done: Callable[[FrameSegments | BridgeError], None],
        *,
        final: bool | None = None,
    ) -> FrameSegments | None:
        """Encode an outcome as `encode_response` does; raises BridgeError for an error.

        Returns None if classification of a large output takes long: a worker passes the frame to
        ``done``.
        """
        if not isinstance(outcome, InferResponse):
            raise outcome.copy()
        model, form = known.model, known.form
        encode = partial(
            encode_response, form, identifier, outcome, model.config, model.version, final=final
        )
        if classified_bytes(outcome, classes_of(form.outputs)) <= HEAVY_BYTES:
            return encode()
        self._workers.run(encode, done)
        return None

    def pack(
        self,
        packing: Packing,
        frame: FrameSegments,
        done: Callable[[FrameSegments | BridgeError], None],
    ) -> FrameSegments | None:
        """Return a compressed frame if it is small; else None, and a worker passes it to ``done``."""
        if sum(map(len, frame)) <= _PACKED_AT_ONCE:
            return packing.frame(frame)

        def finish(packed: FrameSegments | BridgeError) -> None:
            # What does not become shorter is sent from where it lies.
            if not isinstance(packed, BridgeError) and packed is not frame:
                packed = charged(self._budget, packed)
            done(packed)

        self._workers.run(partial(packing.frame, frame), finish)
        return None


def _failed(error: BridgeError) -> CallFailed:
    unknown = error.code == ErrorCode.UNSUPPORTED
    return CallFailed(Status.UNIMPLEMENTED if unknown else Status.INTERNAL, error.message)


def accepted_packing(accepted: bytes, level: CompressionLevel) -> Packing | None:
    """Return the compression of responses that a client accepts, or None."""
    codings = {coding.strip() for coding in accepted.decode("latin-1").lower().split(",")}
    for coding in ("gzip", "deflate"):
        if level != "none" and coding in codings:
            return Packing(coding, _ZLIB_LEVELS[level])
    return None


def _without_prefix(segments: Sequence[bytes | memoryview]) -> FrameSegments:
    """Return the message in a frame's segments; the first segment has the whole prefix."""
    return [memoryview(segments[0])[PREFIX:], *segments[1:]]
