"""A configuration that a model completes: by its first instance, while the others wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gpubridge.errors import BridgeError


class Completion:
    """One completion of one model's configuration, shared by its instances.

    The process of the first instance imports the model, completes the configuration, and waits until
    it is checked; then it initializes the same model. The other instances import it meanwhile.

    ``finish``: checks what the model made of the configuration (None: nothing), and gives every
    instance the settings that follow; raises BridgeError when it cannot be served.
    """

    def __init__(self, finish: Callable[[str | None], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        self._finish = finish
        self._returned: asyncio.Future[str | None] = loop.create_future()
        self._settled: asyncio.Future[None] = loop.create_future()
        _leave_unasked(self._settled)

    def returned(self, text: str | None) -> None:
        """The first instance's process says what its model made of the configuration."""
        if not self._returned.done():
            self._returned.set_result(text)

    async def settled(self, first: bool, started: asyncio.Future[None]) -> None:
        """Wait, for one instance, until the configuration is complete and its settings are there.

        - ``first``: whether it is the instance whose process completes the configuration.
        - ``started``: fails when the instance's process does.

        Raises BridgeError: why there is no configuration, or why this process failed before there
        was one.
        """
        work = asyncio.ensure_future(self._settle() if first else asyncio.shield(self._settled))
        _leave_unasked(work)
        _leave_unasked(started)
        try:
            await asyncio.wait([work, started], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await started
                raise BridgeError(
                    "the model's process was ready before its configuration was complete"
                )
            await work
        except BaseException as error:
            work.cancel()
            if first:
                self._give_up(error)
            raise

    async def _settle(self) -> None:
        await self._finish(await self._returned)
        self._settled.set_result(None)

    def _give_up(self, error: BaseException) -> None:
        """Tell the instances that wait that there will be no configuration."""
        if self._settled.done():
            return
        if isinstance(error, Exception):
            self._settled.set_exception(error)
        else:
            self._settled.cancel()


def _leave_unasked(future: asyncio.Future[None]) -> None:
    """Have nobody complain of an error in ``future`` that nobody asks for."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
