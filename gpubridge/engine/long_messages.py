"""Messages of stubs that are too long to be read on the event loop: a worker reads them, in order."""

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

    - ``error``: that of an error, UTF-8; None for a short one.
    - ``error_body``: the JSON object by which HTTP tells it.
    - ``parameters``: response parameters; None for short ones.
    """

    error: memoryview | None
    error_body: bytes
    parameters: Parameters | None


class ReadMessage(NamedTuple):
    """A long message of a stub as a worker has read it.

    - ``message``: itself, without the long texts of its responses.
    - ``texts``: those, by the number that the contexts of responses have in ``set_aside``.
    """

    message: bytes
    texts: Sequence[LongTexts]


def read_message(message: bytes) -> ReadMessage:
    """See to the long texts of a stub's message; raises MalformedMessage."""
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
            raise MalformedMessage("an error whose text is no UTF-8")
    return LongTexts(error, body or b"", _long_parameters(fields.get("parameters")))


def _long_parameters(text: memoryview | None) -> Parameters | None:
    if text is None:
        return None
    packed = dataplane.pack_json_parameters(text)
    if packed is None:
        return json_object(bytes(text), "response parameters")
    return LongParameters([EncodedParameters(text[1:-1], packed)])


class LongMessages(Generic[_Message]):
    """Has the long messages of one channel read by a worker.

    While one is read, nothing else may be received from the channel, so that order is kept.

    - ``decode``: makes of a message what ``take`` gets; called in a worker.
    - ``take``: gets that, or why there is none, and the descriptors that came with it, which are
      its own then; called on the event loop.
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
        """Return whether one is being read."""
        return self._reading is not None

    def begin(self, notice: bytes, fds: list[int]) -> None:
        """Have one read; the descriptors are taken over."""
        spill, *others = fds
        decode = self._decode

        def read() -> _Message:
            return decode(read_spilled(notice, [spill]))

        def done(message: _Message | BridgeError) -> None:
            # What was taken earlier is not taken again.
            if self._reading is reading:
                self._reading = None
                self._take(message, others)

        reading = self._reading = _Reading(read, self._workers.run(read, done), spill, others)

    def finish(self) -> bool:
        """Take at once the one that is being read, although everybody waits; returns whether there was one."""
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
        """Forget the one that is being read; no other is begun."""
        # Their owner holds this: what a dead stub had open shall not wait for the collector.
        del self._decode, self._take
        reading, self._reading = self._reading, None
        if reading is not None:
            close_all(reading.fds)
            if reading.future.cancel():
                close_all([reading.spill])


class _Reading(NamedTuple, Generic[_Message]):
    """A message that is being read: how, by whom, its memory, the descriptors that came with it."""

    read: Callable[[], _Message]
    future: Future[_Message]
    spill: int
    fds: list[int]
