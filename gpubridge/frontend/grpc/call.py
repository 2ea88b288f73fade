"""A call: one stream's request message or messages, and its answer."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.dataplane import HeaderFields, RequestHeaders
from gpubridge.errors import BridgeError
from gpubridge.frontend.control import ControlTasks
from gpubridge.frontend.grpc.packing import Packing
from gpubridge.frontend.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallFailed,
    Status,
    failure,
)
from gpubridge.frontend.lateness import Rate, bytes_per_second
from gpubridge.protocol.grpc.infer_response import encode_frame

if TYPE_CHECKING:
    from gpubridge.frontend.grpc.connection import GrpcConnection

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def read_timeout(value: bytes) -> float | None:
    """Return the seconds of a ``grpc-timeout``; None for what is none."""
    match = _TIMEOUT.fullmatch(value)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


class Opening(NamedTuple):
    """Start of a call.

    - ``limit``: bytes of a message, after decompression too.
    - ``parameters``: headers that reach the model.
    """

    connection: GrpcConnection
    stream_id: int
    headers: RequestHeaders
    limit: int
    parameters: Mapping[str, str] = MappingProxyType({})


class Call(ABC):
    """A call of any kind: its state, its deadline and how it ends."""

    def __init__(self, opening: Opening) -> None:
        self._connection, self._stream_id, self._headers, self._limit, self._parameters = opening
        self._packing: Packing | None = None
        self._rate: Rate | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Gives a compressed message as it was.
        self._unpacking: asyncio.Task[None] | None = None
        # Reads a message that takes long.
        self._reading: asyncio.Task[None] | None = None
        self._told = False
        self._done = False

    # -- what the connection tells ---------------------------------------------------------------

    @abstractmethod
    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Take messages; so many bytes were received for them, and for the beginning of another."""

    def refuse(self, error: Exception) -> None:
        """End the call: what comes on its stream is no request, or there is no memory for it."""
        self._give_up()
        self.fail(error)

    def writable(self) -> None:
        """All that was queued is on its way."""

    def drain(self) -> None:
        """The server stops: take nothing new, and end when what is there is answered."""

    def cut_short(self) -> None:
        """The client sends no more: end when what it has asked is answered."""

    def check(self, now: float, window: float) -> None:
        """Fail if the request's message comes too slowly, in windows of so many seconds."""

    def abort(self) -> None:
        """The stream is gone: nobody waits for an answer."""
        self._settle()

    def pack(self, packing: Packing) -> None:
        """Compress the answer, if it is one to inference."""

    def limit_time(self, seconds: float) -> None:
        """End the call with DEADLINE_EXCEEDED after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._late)

    # -- how it ends -----------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        if self._done:
            return
        fields = failure(error, begun=self._told)
        self._connection.http2.send_headers(self._stream_id, fields, True)
        self._finish()

    def _succeed(self) -> None:
        """End the call, all of its answer being sent."""
        self._tell()
        self._connection.http2.send_headers(self._stream_id, OK_TRAILERS, True)
        self._finish()

    def _answer_all(self, body: Sequence[bytes | memoryview]) -> None:
        """End the call with all of its answer."""
        self._connection.http2.send_response(self._stream_id, self._opening(), body, OK_TRAILERS)
        self._finish()

    def _tell(self) -> None:
        """Send the headers of the answer, once."""
        if not self._told:
            self._told = True
            self._connection.http2.send_headers(self._stream_id, self._opening())

    def _opening(self) -> HeaderFields:
        return RESPONSE_HEADERS if self._packing is None else self._packing.headers

    def _finish(self) -> None:
        self._settle()
        self._connection.forget(self._stream_id)
        self._connection.flush_soon()

    def _settle(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in (self._unpacking, self._reading):
            if task is not None:
                task.cancel()
        self._unpacking = self._reading = None

    def _late(self) -> None:
        self._timer = None
        if not self._done:
            # Before the answer, so that what the call holds is given up.
            self._give_up()
            self.fail(CallFailed(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _give_up(self) -> None:
        """Let go of what the call holds or waits for."""

    def _check_rate(
        self, now: float, window: float, message: object, arrived: int, held: int
    ) -> None:
        """Fail if a message comes too slowly that holds so many bytes of memory."""
        if self._rate is None:
            self._rate = Rate(window)
        if self._rate.too_slow(now, message, arrived, held):
            text = f"expected {bytes_per_second(held)} bytes a second of the request's message "
            self._give_up()
            self.fail(
                CallFailed(Status.DEADLINE_EXCEEDED, f"{text}within {window:g} s, or its end")
            )

    def _unpack(self, message: bytes, then: Callable[[bytes], None]) -> bytes | None:
        """Return a compressed message as it was; None where ``then`` gets it later.

        Raises CallFailed for what is none; later, that ends the call.
        """

        def done(plain: bytes | BridgeError | CallFailed) -> None:
            self._unpacking = None
            if isinstance(plain, bytes):
                then(plain)
            else:
                self.refuse(plain)

        plain = self._connection.coder.unpack(
            message, self._headers.coding, self._limit, self._connection.account, done
        )
        if isinstance(plain, bytes):
            return plain
        self._unpacking = plain
        return None


class SingleMessageCall(Call):
    """A call whose request is one message."""

    @abstractmethod
    def complete(self, message: bytes, compressed: bool) -> None:
        """Take the message."""

    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Take the message."""
        self.complete(messages[0], compressed)

    def _complete_packed(self, message: bytes) -> None:
        """Take the message, which is compressed."""
        try:
            plain = self._unpack(message, lambda plain: self.complete(plain, False))
        except CallFailed as error:
            self.fail(error)
        else:
            if plain is not None:
                self.complete(plain, False)


class LargeMessageCall(SingleMessageCall):
    """One whose message comes in pieces if it is large."""

    @abstractmethod
    def large(self, nbytes: int) -> None:
        """Begin to receive a large message."""

    @abstractmethod
    def data(self, view: memoryview, end: bool) -> None:
        """Take part of the large message; with ``end`` no more comes."""

    def filled(self, end: bool) -> None:
        """Take note that the memory is full which was named for what comes."""


class UnaryCall(SingleMessageCall):
    """A call that is answered once.

    ``answer``: makes the answer's message of the request's, or a coroutine that does; may raise
    BridgeError.
    """

    def __init__(
        self,
        opening: Opening,
        answer: Callable[[Any], bytes | Coroutine[Any, Any, bytes]],
        tasks: ControlTasks,
    ) -> None:
        super().__init__(opening)
        self._answer = answer
        self._tasks = tasks

    def complete(self, message: bytes, compressed: bool) -> None:
        """Answer the one message, or begin to."""
        if compressed:
            self._complete_packed(message)
        else:
            self._take(message)

    def _take(self, message: bytes | memoryview) -> None:
        try:
            answer = self._answer(message)
        except Exception as error:
            self.fail(error)
            return
        if isinstance(answer, bytes):
            self._respond(answer)
        else:
            self._tasks.start(answer, self._respond)

    def _respond(self, outcome: bytes | BridgeError) -> None:
        if self._done:
            # Nobody waits any more: the client is gone, or its time is over.
            return
        if isinstance(outcome, BridgeError):
            self.fail(outcome)
        else:
            self._answer_all([encode_frame(outcome)])
