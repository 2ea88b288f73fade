"""gRPC calls: request messages and the response of one stream."""

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
from gpubridge.frontend.timeouts import MinimumRate, bytes_per_second
from gpubridge.host_shm import Body, Budget, PrivateMemory
from gpubridge.protocol.grpc.infer_response import encode_frame

if TYPE_CHECKING:
    from gpubridge.frontend.grpc.connection import GrpcConnection

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def read_timeout(value: bytes) -> float | None:
    """Return the seconds of a ``grpc-timeout`` value; None if it is malformed."""
    match = _TIMEOUT.fullmatch(value)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


class Opening(NamedTuple):
    """Start of a call.

    - ``limit``: maximum bytes of a message, also after decompression.
    - ``parameters``: forwarded headers.
    - ``context``: the headers of a trace context, if they matter.
    """

    connection: GrpcConnection
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
        fields = failure(error, begun=self._headers_sent)
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
        self, now: float, window: float, message: object, arrived: int, held: int
    ) -> None:
        """Fail if a message is received too slowly; ``held`` is the memory that it holds."""
        if self._rate is None:
            self._rate = MinimumRate(window)
        if self._rate.too_slow(now, message, arrived, held):
            self._abandon()
            least = bytes_per_second(held)
            text = f"request message too slow: minimum {least} bytes/s over {window:g} s"
            self.fail(CallFailed(Status.DEADLINE_EXCEEDED, text))

    def _unpack(self, message: bytes, then: Callable[[bytes], None]) -> bytes | None:
        """Return a decompressed message, or None if ``then`` is called with it later.

        Raises CallFailed for a malformed message; one found later fails the call.
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
        """Handle the message."""

    def messages(self, nbytes: int, messages: list[bytes], compressed: bool, end: bool) -> None:
        """Handle the message."""
        self.complete(messages[0], compressed)

    def _complete_packed(self, message: bytes) -> None:
        """Decompress the message, then handle it."""
        try:
            plain = self._unpack(message, lambda plain: self.complete(plain, False))
        except CallFailed as error:
            self.fail(error)
        else:
            if plain is not None:
                self.complete(plain, False)


class LargeMessageCall(SingleMessageCall):
    """A call whose message is received in pieces if it is large."""

    @abstractmethod
    def large(self, nbytes: int) -> None:
        """Begin to receive a large message."""

    @abstractmethod
    def data(self, view: memoryview, end: bool) -> None:
        """Receive part of the large message; ``end`` says that it is the last."""

    def filled(self, end: bool) -> None:
        """Continue: the memory named to `Http2Connection.receive_into` is full."""


class UnaryCall(SingleMessageCall):
    """A call with one response message.

    ``answer``: returns the response message, or a coroutine that does, for the request message; may
    raise BridgeError.
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
        """Respond to the message, now or when the coroutine ends."""
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
            # The client is gone, or its deadline has passed.
            return
        if isinstance(outcome, BridgeError):
            self.fail(outcome)
        else:
            self._send_whole_response([encode_frame(outcome)])


class LoadCall(UnaryCall, LargeMessageCall):
    """A model load, whose large message is charged to its connection.

    ``budget``: of the memory for all requests.
    """

    def __init__(self, *given: Any, budget: Budget) -> None:
        super().__init__(*given)
        self._budget = budget
        self._memory: PrivateMemory | None = None
        self._arrived = 0

    def large(self, nbytes: int) -> None:
        """Begin to receive a large message."""
        body = Body(self._budget, self._connection.account, self.refuse)
        self._memory = PrivateMemory(nbytes, body)

    def data(self, view: memoryview, end: bool) -> None:
        """Receive part of the large message."""
        large = self._memory
        if large is None:
            return
        begin, self._arrived = self._arrived, self._arrived + len(view)
        large.count(self._arrived)
        large.memory[begin : self._arrived] = view
        if self._is_whole(large):
            large.complete()
            self._take(large.memory)
        elif end:
            raise CallFailed(Status.INTERNAL, "the request ends in the middle of its message")

    def check(self, now: float, window: float) -> None:
        """Fail if a large message is received too slowly."""
        if self._memory is not None and not self._is_whole(self._memory):
            self._check_rate(now, window, self._memory, self._arrived, self._arrived)

    def _is_whole(self, large: PrivateMemory) -> bool:
        return self._arrived == len(large.memory)

    def _release(self) -> None:
        super()._release()
        large, self._memory = self._memory, None
        if large is not None:
            large.close()
