"""Long messages of stubs: read by a worker instead of the event loop, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from gpubridge import dataplane
from gpubridge.engine.workers import Workers
from gpubridge.errors import BridgeError
from gpubridge.request import EncodedParameters, LongParameters, Parameters
from gpubridge.transport.calls import check_length
from gpubridge.transport.channel import MalformedMessage, close_all, read_spilled
from gpubridge.transport.context import LONG_TEXT
from gpubridge.transport.messages import Kind, set_long_texts_aside
from gpubridge.transport.records import json_object

_Message = TypeVar("_Message")


class LongTexts(NamedTuple):
    """The long texts of one response.

    - ``error``: error message, UTF-8; None if it is short.
    - ``error_body``: the HTTP error body, a JSON object.
    - ``parameters``: response parameters; None if they are short.
    """

    error: memoryview | None
    error_body: bytes
    parameters: Parameters | None


class ReadMessage(NamedTuple):
    """A long message of a stub, read by a worker.

    - ``message``: the message without the long texts of its responses.
    - ``texts``: the long texts; contexts of responses have their indices in ``set_aside``.
    """

    message: bytes
    texts: Sequence[LongTexts]


def read_message(message: bytes) -> ReadMessage:
    """Remove the long texts from a stub's message and encode them; raises MalformedMessage."""
    if message[0] not in (Kind.RESULTS, Kind.RESPONSES):
        check_length(message)
        return ReadMessage(message, ())
    message, taken = set_long_texts_aside(message, LONG_TEXT)
    return ReadMessage(message, [_long_texts(fields) for fields in taken])


def _long_texts(fields: dict[str, memoryview]) -> LongTexts:
    error, body = fields.get("error"), None
    if error is not None:
        body = dataplane.format_json_string('{"error":', error, "}")
        if body is None:
            raise MalformedMessage("an error message that is not UTF-8")
    return LongTexts(error, body or b"", _long_parameters(fields.get("parameters")))


def _long_parameters(text: memoryview | None) -> Parameters | None:
    if text is None:
        return None
    packed = dataplane.pack_json_parameters(text)
    if packed is None:
        return json_object(bytes(text), "response parameters")
    return LongParameters([EncodedParameters(text[1:-1], packed)])


class LongMessages(Generic[_Message]):
    """Reads the long messages of one channel in a worker.

    While one is read, the owner receives nothing else from the channel, so that order is kept.

    - ``decode``: decodes a message; called in a worker.
    - ``take``: gets the decoded message or an error, and the descriptors of the message, which it
      takes over; called on the event loop.
    """

    __slots__ = ("_decode", "_reading", "_take", "_workers")

    def __init__(
        self,
        workers: Workers,
        decode: Callable[[bytes], _Message],
        take: Callable[[_Message | BridgeError, list[int]], None],
    ) -> None:
        self._workers = workers
        self._decode = decode
        self._take = take
        self._reading: _Reading[_Message] | None = None

    @property
    def reading(self) -> bool:
        """Return whether a message is being read."""
        return self._reading is not None

    def begin(self, notice: bytes, fds: list[int]) -> None:
        """Read the message of a notice in a worker; takes the descriptors over."""
        spill, *others = fds
        decode = self._decode

        def read() -> _Message:
            return decode(read_spilled(notice, [spill]))

        def done(message: _Message | BridgeError) -> None:
            # `finish` may have delivered it already.
            if self._reading is reading:
                self._reading = None
                self._take(message, others)

        reading = self._reading = _Reading(read, self._workers.run(read, done), spill, others)

    def finish(self) -> bool:
        """Deliver the message being read now, blocking the event loop; return whether there was one."""
        reading, self._reading = self._reading, None
        if reading is None:
            return False
        message: _Message | BridgeError
        try:
            message = reading.read() if reading.future.cancel() else reading.future.result()
        except BridgeError as error:
            message = error
        self._take(message, reading.fds)
        return True

    def close(self) -> None:
        """Drop the message being read; no other may begin."""
        # Break the cycle with the owner, so that a dead stub's memory is freed now.
        del self._decode, self._take
        reading, self._reading = self._reading, None
        if reading is not None:
            close_all(reading.fds)
            if reading.future.cancel():
                close_all([reading.spill])


class _Reading(NamedTuple, Generic[_Message]):
    """A message being read: function, future, memory, and the other descriptors of the message."""

    read: Callable[[], _Message]
    future: Future[_Message]
    spill: int
    fds: list[int]
