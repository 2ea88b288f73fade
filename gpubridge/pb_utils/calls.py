"""Calls of other models (business logic scripting), as a model sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gpubridge.pb_utils.response import InferenceResponse

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator

    from gpubridge.pb_utils.request import InferenceRequest


class ResponseSource(Protocol):
    """One call: where its responses come from; given by the process around the model."""

    def next(self) -> InferenceResponse | None:
        """Wait for the next response; None when there are no more."""

    def when_ready(self, loop: asyncio.AbstractEventLoop, /) -> asyncio.Future[None]:
        """Return what is done when :meth:`next` need not wait; in a coroutine of ``loop``."""

    def cancel(self) -> None:
        """Tell the called model that nobody needs its responses; does not wait."""


class ModelCaller(Protocol):
    """Sends requests to other models; given by the process around the model."""

    def call(
        self,
        request: InferenceRequest,
        decoupled: bool,
        loop: asyncio.AbstractEventLoop | None = None,
        /,
    ) -> ResponseSource:
        """Send a request: now, or with others at the end of this turn of ``loop``."""


class ResponseIterator:
    """The responses to a call with ``decoupled=True``.

    Iterates, also with ``async for``, over the responses in their order; the last may be empty, where
    the model said afterwards that there are no more. Iterating again begins with the first response.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_at", "_ended", "_source", "_taken")

    _at: int
    _ended: bool
    _source: ResponseSource
    _taken: list[InferenceResponse]

    def __init__(self) -> None:
        raise TypeError("c_python_backend_utils.ResponseIterator: No constructor defined!")

    @classmethod
    def _of(cls, source: ResponseSource) -> ResponseIterator:
        iterator = object.__new__(cls)
        iterator._source = source
        iterator._taken = []
        iterator._at = 0
        iterator._ended = False
        return iterator

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._ended and self._at == len(self._taken):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        response = self._take()
        if response is None:
            raise StopIteration("Iteration is done for the responses.")
        return response

    def _take(self) -> InferenceResponse | None:
        if self._at == len(self._taken) and not self._ended:
            response = self._source.next()
            if response is None:
                self._ended = True
            else:
                self._taken.append(response)
        if self._at == len(self._taken):
            return None
        self._at += 1
        return self._taken[self._at - 1]

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        iter(self)
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._at == len(self._taken) and not self._ended:
            await _when_ready(self._source)
        response = self._take()
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Tell the called model that nobody needs its responses; it decides what it still sends.

        Does nothing when the last response has come.
        """
        self._source.cancel()


async def begun(source: ResponseSource) -> ResponseIterator:
    """Wait for the first response of a call, or its end; returns the iterator of all."""
    await _when_ready(source)
    return ResponseIterator._of(source)


async def first_response(source: ResponseSource) -> Any:
    """Wait for the one response of a call."""
    await _when_ready(source)
    return source.next()


async def _when_ready(source: ResponseSource) -> None:
    # Loaded already: a coroutine runs.
    from asyncio import get_running_loop  # noqa: PLC0415

    await source.when_ready(get_running_loop())
