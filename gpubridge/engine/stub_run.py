"""One stub of an instance, from its start to its end: the process, and what connects it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.dataplane import InstanceFeed
from gpubridge.engine.context import EngineContext
from gpubridge.engine.devices.region import Closable
from gpubridge.engine.ready_check import ReadyCheck
from gpubridge.engine.starting import Completion
from gpubridge.engine.stub_connection import StubConnection
from gpubridge.engine.stub_process import RunningStub, cannot_start
from gpubridge.errors import BridgeError, ErrorCode, StubDied
from gpubridge.request import InferRequest
from gpubridge.transport.channel import pair
from gpubridge.transport.messages import Kind

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance

_logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.5
_LEAST_CONNECTING_SECONDS = 10.0
REAP_SECONDS = 5.0
"""A process that waits for a driver or a dead mount may outlive even SIGKILL."""


class StubRun:
    """A stub of an instance; owns its process, the connection to it, and the endpoint of its calls.

    - ``instance``: whose stub it is; its settings may change while the model completes its
      configuration.
    - ``feed``: leads batches to it.
    - ``completion``: what completes the model's configuration, if that is not done yet.
    - ``on_log``: gets the fields of each line that the stub logs.

    Attribute ``ready_check``: asks its model's ``is_ready``, if it has one.

    Raises BridgeError: UNAVAILABLE when there are no descriptors or no memory for it.
    """

    def __init__(
        self,
        instance: Instance,
        feed: InstanceFeed,
        context: EngineContext,
        completion: Completion | None,
        on_log: Callable[[dict[str, Any]], None],
    ) -> None:
        self._instance = instance
        self.feed = feed
        self.ready_check = ReadyCheck(instance.name)
        self.on_log = on_log
        self._context = context
        self._completion = completion
        self._loop = asyncio.get_running_loop()
        self._process: RunningStub | None = None
        self._call_door: Closable | None = None
        self._connecting: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        try:
            ours, self._theirs = pair()
        except OSError as error:
            raise cannot_start(instance.name, error) from error
        try:
            arena = context.regions.arena(instance.settings.stub["name"])
            limit = instance.settings.output_limit
            self.link = StubConnection(
                ours,
                context.regions,
                arena,
                instance.counters,
                limit,
                self,
                context.workers,
                context.turn,
            )
        except BridgeError:
            ours.close()
            self._theirs.close()
            raise
        feed.connect(self.link.requests)

    @property
    def exited(self) -> asyncio.Future[str]:
        """Resolves to how the process ended, once all that it had sent is taken."""
        return self._ended

    # -- start ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process; returns when its model is initialized.

        Raises BridgeError: why it is not going to be. The run has to be ended and closed in any
        case.
        """
        try:
            ours, calls = pair()
        except OSError as error:
            raise cannot_start(self._instance.name, error) from error
        instance = self._instance
        with calls:
            try:
                if instance.settings.environment.python != sys.executable:
                    await self._context.environments.answers(instance.settings.environment)
                settings = await self._context.devices.equip(instance.settings, self.link)
                environment, model = instance.settings.environment, instance.settings.stub["name"]
                start = self._context.start_stub
                self._process = start(environment, model, instance.name, self._theirs)
            except (BridgeError, asyncio.CancelledError):
                ours.close()
                raise
            self._call_door = self._context.calls.open(ours, self.link, instance)
            self._process.exited.add_done_callback(self._on_exit)
            self.link.initialize(settings, calls.fileno())
        self._await_connection(self._context.backend.stub_timeout_seconds)
        if self._completion is not None:
            await self._completion.settled(instance.index == 0, self._started)
            self.link.tell(Kind.CONFIGURE, **instance.settings.stub)
        await self._started

    def _await_connection(self, told: float | None) -> None:
        """End a process that does not connect in time, if a limit was ``told``."""
        if told is not None and not self._ended.done():
            # Start commands carry 1: not even a good interpreter is always up by then.
            seconds = max(told, _LEAST_CONNECTING_SECONDS)
            how = f"was killed: it had not connected for {seconds:g} s (stub-timeout-seconds)"
            self._connecting = self._loop.call_later(seconds, self.kill, how)

    def expect(self) -> asyncio.Future[None]:
        """Return a future for what the starting stub does next; it fails when the stub dies."""
        self._started = self._loop.create_future()
        if self._ended.done():
            self._started.set_exception(StubDied(self.unhealthy(self._ended.result())))
        return self._started

    def lead_by(self, feed: InstanceFeed) -> None:
        """Have batches led to it by another feed."""
        self.feed.close()
        self.feed = feed
        feed.connect(self.link.requests)

    # -- end -----------------------------------------------------------------------------------

    async def finalize(self, seconds: float) -> None:
        """Have it finalize its model and end by itself; kill it if it has not within ``seconds``."""
        if not self.exited.done():
            self.link.tell(Kind.FINALIZE)
            await asyncio.wait([self.exited], timeout=seconds)
        if not self.exited.done():
            how = f"was killed: it had not ended {seconds:g} s after it was told to finalize"
            _logger.warning("%s", self.unhealthy(how))
            self.kill(how)

    def kill(self, why: str | None = None) -> None:
        """End the process at once; ``why`` is told of its end."""
        if self._process is not None:
            self._process.kill(why)

    async def end(self) -> None:
        """Kill the process, if there is one, and wait until it is gone, or cannot be killed."""
        if self._process is not None:
            self._process.kill()
            await asyncio.wait([self._ended], timeout=REAP_SECONDS)

    def close(self) -> tuple[list[InferRequest], list[InferRequest]]:
        """Close what led to a dead stub; returns the requests that it had started, and had not."""
        self.ready_check.close()
        # Nothing more is sent there, whatever its last answers make room for.
        self.feed.close()
        # The process's, if there ever was one.
        self._theirs.close()
        if self._process is not None:
            # One that could not be killed may end at any time.
            self._process.exited.remove_done_callback(self._on_exit)
        door, self._call_door = self._call_door, None
        if door is not None:
            door.close()
        left = self.link.close()
        # It holds this run: what a dead stub had open shall not wait for the collector.
        del self.link
        return left

    def unhealthy(self, how: str) -> str:
        """Say how it ended, as requests are told."""
        return f"Stub process '{self._instance.name}' is not healthy. It {how}."

    # -- what the link and the process tell ------------------------------------------------------

    def on_connected(self) -> None:
        """The process runs, and has read what it is to do."""
        if self._connecting is not None:
            self._connecting.cancel()

    def on_completed(self, text: str | None) -> None:
        """The model says what it made of its configuration."""
        if self._completion is not None:
            self._completion.returned(text)

    def on_ready(self, fd: int | None) -> None:
        """The model is initialized; by ``fd``, owned from now on, its ``is_ready`` is asked, if it has one."""
        if fd is not None:
            self.ready_check.connect(fd)
        if not self._started.done():
            self._started.set_result(None)

    def on_failed(self, text: str) -> None:
        """The model is not initialized."""
        if not self._started.done():
            self._started.set_exception(BridgeError(text, ErrorCode.INTERNAL))

    def on_broken(self, what: str) -> None:
        """The channel is of no use any more."""
        # A dying process closes its channel a moment before it is gone: let it tell its own end.
        if self._process is not None:
            seconds = _LAST_WORDS_SECONDS if what.startswith("closed") else 0.0
            self._loop.call_later(seconds, self._process.kill, f"{what} and was killed")

    def _on_exit(self, future: asyncio.Future[str]) -> None:
        self.on_connected()
        # Its end may be known before what it said last: why its model does not load, answers.
        self.link.hear_out(partial(self._on_end, future.result()))

    def _on_end(self, how: str) -> None:
        self._ended.set_result(how)
        if not self._started.done():
            self._started.set_exception(StubDied(self.unhealthy(how)))
