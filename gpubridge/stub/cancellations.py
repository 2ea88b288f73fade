"""Tells coroutines that their request is cancelled, when the server says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpubridge.transport.control import ControlPage

if TYPE_CHECKING:
    import asyncio


class Cancellations:
    """Coroutines that want to be told of a cancellation, by the tickets of their requests."""

    def __init__(self, control: ControlPage) -> None:
        self._control = control
        self._watches: dict[int, _Watch] = {}

    @contextmanager
    def watched(self, ticket: int, react: Callable[[], object]) -> Iterator[None]:
        """Call ``react`` on the running event loop once the request is cancelled, until the block ends.

        The request must stay open for that long, so that its ticket is no other request's.
        """
        # A coroutine runs, so that asyncio is loaded.
        from asyncio import get_running_loop  # noqa: PLC0415

        watch = self._watches[ticket] = _Watch(get_running_loop(), react)
        # The message may have come before.
        self.tell(ticket)
        try:
            yield
        finally:
            watch.react = None
            if self._watches.get(ticket) is watch:
                del self._watches[ticket]

    def tell(self, ticket: int) -> None:
        """Tell the coroutine that a request is cancelled, if it is: a message may be of an earlier one."""
        watch = self._watches.get(ticket)
        if watch is not None and self._control.cancelled[ticket]:
            watch.tell()


class _Watch:
    __slots__ = ("_loop", "react")

    def __init__(self, loop: asyncio.AbstractEventLoop, react: Callable[[], object]) -> None:
        self._loop = loop
        self.react: Callable[[], object] | None = react

    def tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._react)
        except RuntimeError:
            # The loop is closed: the coroutine runs no more.
            pass

    def _react(self) -> None:
        react, self.react = self.react, None
        if react is not None:
            react()
