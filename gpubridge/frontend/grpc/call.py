"""gRPC calls: request messages and the response of one stream."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from gpubridge.dataplane import HeaderFields, Http2Connection, RequestHeaders
from gpubridge.errors import BridgeError
from gpubridge.frontend.control import ControlTasks
from gpubridge.frontend.grpc.packing import MessageCoder, Packing
from gpubridge.frontend.grpc.status import (
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallFailed,
    Status,
)
from gpubridge.frontend.timeouts import MinimumRate, bytes_per_second
from gpubridge.host_shm import LARGE_BYTES, Account, Body, PrivateBytes
from gpubridge.host_shm.private_memory import PrivateMemory
from gpubridge.protocol.grpc.infer_response import encode_frame

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def read_timeout(value: bytes) -> float | None:
    """Return the seconds of a ``grpc-timeout`` value; None if it is malformed."""
    match = _TIMEOUT.fullmatch(value)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


class CallConnection(Protocol):
    """The connection of a call, as the call uses it.

    - ``account``: the memory that the connection's messages take.
    - ``coder``: compresses messages, and decompresses them.
    - ``flush_soon``: writes what `http2` has been given, in this turn of the event loop.
    """

    http2: Http2Connection
    account: Account
    coder: MessageCoder
    flush_soon: Callable[[], None]

    @property
    def shortage(self) -> BridgeError | None:
        """The error of requests while there is no memory for more; None while there is."""

    def new_body(self, refuse: Callable[[BridgeError], None]) -> Body:
        """Return the charge of a message; ``refuse`` is called where there is no memory for it."""

    def forget(self, stream_id: int) -> None:
        """Forget a stream that has ended."""

    def failure(self, error: Exception, number: int, *, begun: bool = False) -> HeaderFields:
        """Return the header fields of a call that fails, which is logged.

        ``number``: of the call in the access log; ``begun``: whether response headers have been sent.
        """

    def log_failure(self, error: BridgeError, number: int) -> None:
        """Log the error of a request, if it is a fault of its model or the server."""


class Opening(NamedTuple):
    """Start of a call.

    - ``limit``: maximum bytes of a message, also after decompression.
    - ``parameters``: forwarded headers.
    - ``context``: the headers of a trace context, if they matter.
    """

    connection: CallConnection
    stream_id: int
    headers: RequestHeaders
    limit: int
    parameters: Mapping[str, str] = MappingProxyType({})
    context: tuple[bytes, bytes] | None = None


class Call(ABC):
    """Base of calls: state, deadline and end of a call."""

    def __init__(self, opening: Opening) -> None:
        self._connection, self._stream_id, self._headers, self._limit = opening[:4]
        self._parameters, self._context = opening.parameters, opening.context
        self._packing: Packing | None = None
        self._rate: MinimumRate | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Decompresses a message.
        self._unpacking: asyncio.Task[None] | None = None
        # Parses a long message.
        self._reading: asyncio.Task[None] | None = None
        self._headers_sent = False
        self._done = False

    # -- events of the stream --------------------------------------------------------------------

    @abstractmethod
    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Receive messages; ``nbytes`` counts them and the received part of the next one."""

    def refuse(self, error: Exception) -> None:
        """Fail the call: its request is malformed, or there is no memory for it."""
        self._abandon()
        self.fail(error)

    def writable(self) -> None:
        """Continue: all queued bytes have been sent."""

    def drain(self) -> None:
        """Stop reading requests, and end after the pending responses."""

    def input_ended(self) -> None:
        """End after the pending responses: the client has closed its sending side."""

    def check(self, now: float, window: float) -> None:
        """Fail if the request message is received too slowly in a window of seconds."""

    def abort(self) -> None:
        """Release everything: the stream is gone."""
        self._release()

    def pack(self, packing: Packing) -> None:
        """Compress the response, if this is an inference call."""

    def limit_time(self, seconds: float) -> None:
        """Fail the call with DEADLINE_EXCEEDED after so many seconds."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._deadline_passed)

    # -- end of the call -------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        if self._done:
            return
        http2 = self._connection.http2
        if isinstance(error, BridgeError) and error.whose is not None:
            http2.note(self._stream_id, *error.whose)
        fields = self._connection.failure(
            error, http2.number(self._stream_id), begun=self._headers_sent
        )
        self._connection.http2.send_headers(self._stream_id, fields, True)
        self._finish()

    def _succeed(self) -> None:
        """End the call successfully: the whole response has been queued."""
        self._send_headers()
        self._connection.http2.send_headers(self._stream_id, OK_TRAILERS, True)
        self._finish()

    def _send_whole_response(self, body: Sequence[bytes | memoryview]) -> None:
        """Send the whole response and end the call."""
        self._connection.http2.send_response(
            self._stream_id, self._response_headers(), body, OK_TRAILERS
        )
        self._finish()

    def _send_headers(self) -> None:
        """Send the response headers, once."""
        if not self._headers_sent:
            self._headers_sent = True
            self._connection.http2.send_headers(self._stream_id, self._response_headers())

    def _response_headers(self) -> HeaderFields:
        return RESPONSE_HEADERS if self._packing is None else self._packing.headers

    def _finish(self) -> None:
        self._release()
        self._connection.forget(self._stream_id)
        self._connection.flush_soon()

    def _release(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in (self._unpacking, self._reading):
            if task is not None:
                task.cancel()
        self._unpacking = self._reading = None

    def _deadline_passed(self) -> None:
        self._timer = None
        if not self._done:
            # Before the response, so that the call's memory is free by then.
            self._abandon()
            self.fail(CallFailed(Status.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _abandon(self) -> None:
        """Free the memory of the request and cancel submitted requests."""

    def _check_rate(
        self, now: float, window: float, message: int | None, arrived: int, held: int
    ) -> None:
        """Fail if a message is received too slowly.

        ``message``: names it, None while none is on its way; ``held``: the memory that it holds.
        """
        if self._rate is None:
            self._rate = MinimumRate(window)
        if self._rate.too_slow(now, message, arrived, held):
            self._abandon()
            least = bytes_per_second(held)
            text = f"request message too slow: minimum {least} bytes/s over {window:g} s"
            self.fail(CallFailed(Status.DEADLINE_EXCEEDED, text))

    def _unpack(self, message: bytes | memoryview, then: Callable[[bytes], None]) -> bytes | None:
        """Return a decompressed message, or None if ``then`` is called with it later.

        Raises CallFailed for a malformed message; one found later fails the call.
        """

        def done(plain: bytes | BridgeError | CallFailed) -> None:
            self._unpacking = None
            try:
                if not isinstance(plain, bytes):
                    raise plain
                then(plain)
            except Exception as error:
                self.refuse(error)

        plain = self._connection.coder.unpack(
            message, self._headers.coding, self._limit, self._connection.account, done
        )
        if isinstance(plain, bytes):
            return plain
        self._unpacking = plain
        return None


class SingleMessageCall(Call):
    """A call whose request is one message, which is received in pieces if it is large.

    A large message is charged to its connection as it arrives, and as it is decompressed, until the
    call drops it.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        # Receives a large message as it is sent.
        self._large: PrivateMemory | None = None
        self._compressed = False
        # Counts a large message that has been decompressed.
        self._plain: PrivateBytes | None = None
        # Whether all of the message has arrived.
        self._whole = False

    @abstractmethod
    def complete(self, message: bytes | memoryview, compressed: bool) -> None:
        """Handle the message."""

    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Handle the message."""
        self._whole = True
        self.complete(messages[0], compressed)

    def large(self, nbytes: int, compressed: bool) -> None:
        """Begin to receive a large message."""
        self._compressed = compressed
        self._large = PrivateMemory(nbytes, self._connection.new_body(self.refuse))

    def data(self, view: memoryview, end: bool) -> None:
        """Receive part of the large message; ``end`` says that it is the last."""
        large = self._large
        if large is None or self._whole:
            return
        large.put(view)
        if large.whole:
            self._whole = True
            large.complete()
            self.complete(memoryview(large.memory), self._compressed)
        elif end:
            raise CallFailed(Status.INTERNAL, "the request ends in the middle of its message")

    def filled(self, end: bool) -> None:
        """Continue: the memory named to `Http2Connection.receive_into` is full."""

    def check(self, now: float, window: float) -> None:
        """Fail if the message is received too slowly, or does not come."""
        if not self._whole:
            arrived = self._message_bytes()
            self._check_rate(now, window, 0, arrived, arrived)

    def _message_bytes(self) -> int:
        """Return the bytes of the message that have arrived."""
        if self._large is not None:
            return self._large.arrived
        return self._connection.http2.unfinished(self._stream_id)

    def _complete_packed(self, message: bytes | memoryview) -> None:
        """Decompress the message, then handle it."""
        try:
            plain = self._unpack(message, self._complete_plain)
        except CallFailed as error:
            self.fail(error)
        else:
            if plain is not None:
                self._complete_plain(plain)

    def _complete_plain(self, message: bytes) -> None:
        self._drop_message()
        if len(message) > LARGE_BYTES:
            self._plain = PrivateBytes(self._connection.new_body(self.refuse))
            self._plain.count(len(message))
            self._plain.complete()
        self.complete(message, False)

    def _abandon(self) -> None:
        self._drop_message()

    def _release(self) -> None:
        super()._release()
        self._drop_message()

    def _drop_message(self) -> None:
        """Drop the memory of the message, and its charge."""
        held = self._large, self._plain
        self._large = self._plain = None
        for each in held:
            if each is not None:
                each.close()


class UnaryCall(SingleMessageCall):
    """A call with one response message.

    ``answer``: returns the response message, or a coroutine that does, for the request message; may
    raise BridgeError. What it keeps of a large message is charged until the call ends.
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

    def complete(self, message: bytes | memoryview, compressed: bool) -> None:
        """Respond to the message, now or when the coroutine ends."""
        if compressed:
            self._complete_packed(message)
            return
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
            # The client is gone, or its deadline has passed.
            return
        if isinstance(outcome, BridgeError):
            self.fail(outcome)
        else:
            self._send_whole_response([encode_frame(outcome)])
