"""The event loop of a model's coroutines, made when the first one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from gpubridge.stub.coroutines import Coroutines, Done


class ModelLoop:
    """Owns the loop of a model's coroutines, and makes another one where the model has closed it.

    - ``begun``: gets each loop, on its thread, before any coroutine runs there.
    """

    __slots__ = ("_coroutines", "_making", "begun")

    def __init__(self) -> None:
        self._coroutines: Coroutines | None = None
        self._making = threading.Lock()
        self.begun: Callable[[asyncio.AbstractEventLoop], None] | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for it; raises what it raises."""
        return self._made().run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, Any], done: Done) -> None:
        """Run a coroutine concurrently; ``done`` gets its outcome."""
        self._made().start(coroutine, done)

    def awaited(self) -> asyncio.Task[Any] | None:
        """Return the task that :meth:`run` waits for, if it waits."""
        return None if self._coroutines is None else self._coroutines.awaited

    def give_up(self, seconds: float) -> None:
        """Cancel the coroutines that run, and wait no longer for those that go on after a time."""
        if self._coroutines is not None:
            self._coroutines.give_up(seconds)

    def cancel(self, seconds: float) -> None:
        """Cancel the coroutines that run, and wait for them, at most for a time."""
        if self._coroutines is not None:
            self._coroutines.cancel(seconds)

    def close(self, seconds: float) -> None:
        """Cancel all tasks of the loop, wait for them, at most for a time, and end it."""
        if self._coroutines is not None:
            self._coroutines.close(seconds)

    def _made(self) -> Coroutines:
        # asyncio takes 4 MiB and 30 ms, and few models have coroutines.
        from gpubridge.stub.coroutines import Coroutines  # noqa: PLC0415

        with self._making:
            if self._coroutines is None or self._coroutines.ended:
                self._coroutines = Coroutines(self.begun)
            return self._coroutines
