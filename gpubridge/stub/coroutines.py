"""The event loop that a model's coroutines share, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class Coroutines:
    """Runs the coroutines of one model; any thread may ask for it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="model-loop", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and wait for it; raises what it raises."""
        result, error = self._begin(coroutine).result()
        if error is not None:
            raise error
        return result

    def start(
        self,
        coroutine: Coroutine[Any, Any, Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run a coroutine beside others; ``done`` gets its result and what it raised."""
        self._begin(coroutine).add_done_callback(lambda future: done(*future.result()))

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(_outcome(coroutine), self._loop)

    def close(self) -> None:
        """Stop the loop; what still runs on it is dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Wait for a coroutine; what it raises, ``sys.exit()`` say, ends neither loop nor thread."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error
