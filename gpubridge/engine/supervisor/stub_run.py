"""One stub of an instance from start to end: its process and its connections."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gpubridge.dataplane import InstanceFeed
from gpubridge.engine.ipc.stub_connection import StubConnection
from gpubridge.engine.supervisor.context import CallEndpoint, EngineContext
from gpubridge.engine.supervisor.ready_check import ReadyCheck
from gpubridge.engine.supervisor.startup import ConfigCompletion
from gpubridge.engine.supervisor.stub_process import RunningStub, cannot_start
from gpubridge.errors import BridgeError, ErrorCode, StubDied
from gpubridge.request import InferRequest
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.spans import Span
from gpubridge.transport.channel import pair
from gpubridge.transport.control import GIVEN_UP
from gpubridge.transport.messages import Kind

if TYPE_CHECKING:
    from gpubridge.engine.supervisor.instance import Instance

_logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.5
_LEAST_CONNECTING_SECONDS = 10.0
REAP_SECONDS = 5.0
"""A process blocked in a driver or on a dead mount may outlive even SIGKILL."""


class StubRun:
    """A stub of an instance; owns its process, its connection, and the endpoint of its BLS calls.

    - ``instance``: its settings may change while the model completes its configuration.
    - ``feed``: sends batches to the stub.
    - ``completion``: the completion of the model's configuration, unless that is done.
    - ``on_notice``: gets the fields of each notice of the stub.

    Its attributes:

    - ``ready_check``: asks its model's ``is_ready``, if the model has one.
    - ``exited``: resolves to how the process ended, once all its messages are handled.
    - ``warned_full``: whether the log has the warning of `Instance.warn_full`.

    Raises BridgeError: UNAVAILABLE when descriptors or memory are exhausted.
    """

    def __init__(
        self,
        instance: Instance,
        feed: InstanceFeed,
        context: EngineContext,
        completion: ConfigCompletion | None,
        on_notice: Callable[[dict[str, Any]], None],
    ) -> None:
        self._instance = instance
        self.feed = feed
        self.ready_check = ReadyCheck(instance.name)
        self.on_notice = on_notice
        self._context = context
        self._completion = completion
        self._loop = asyncio.get_running_loop()
        self._process: RunningStub | None = None
        self._bls_endpoint: CallEndpoint | None = None
        self._connecting: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self.exited: asyncio.Future[str] = self._loop.create_future()
        self.warned_full = False
        try:
            ours, self._theirs = pair()
        except OSError as error:
            raise cannot_start(instance.name, error) from error
        try:
            arena = context.regions.arena(instance.settings.model)
            limit = instance.settings.output_limit
            self.connection = StubConnection(
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
        feed.connect(self.connection.requests)

    # -- start ---------------------------------------------------------------------------------

    async def start(self, *, again: bool) -> None:
        """Start the process, ``again`` after that of another stub; wait until its model is initialized.

        Raises BridgeError: why that failed. The caller ends and closes the run in any case.
        """
        try:
            ours, calls = pair()
        except OSError as error:
            raise cannot_start(self._instance.name, error) from error
        instance = self._instance
        # Those of a draft, if it is one now; another instance may complete it meanwhile.
        settings = instance.settings.stub
        with calls:
            try:
                environment, model = instance.settings.environment, instance.settings.model
                if again:
                    environment = await self._context.environments.restored(environment)
                if environment.python != sys.executable:
                    await self._context.environments.stat_interpreter(environment)
                gpu = await self._context.devices.prepare_stub(instance.settings, self.connection)
                start = self._context.start_stub
                self._process = await start(environment, model, instance.name, self._theirs, again)
            except (BridgeError, asyncio.CancelledError):
                ours.close()
                raise
            self._bls_endpoint = self._context.calls.open(ours, self.connection, instance)
            self._process.exited.add_done_callback(self._on_exit)
            token = self._process.output_token
            self.connection.initialize(settings, gpu, calls.fileno(), token)
        self._await_connection(self._context.backend.stub_timeout_seconds)
        if self._completion is not None:
            await self._completion.wait_completed(instance.index == 0, self._started)
            self.connection.configure(instance.settings.stub)
        await self._started

    def _await_connection(self, limit: float | None) -> None:
        """Kill a process that does not connect within ``limit`` seconds, if that is set."""
        if limit is not None and not self.exited.done():
            # Triton's start commands often say 1, which is too short for some interpreters.
            seconds = max(limit, _LEAST_CONNECTING_SECONDS)
            how = f"was killed: it had not connected for {seconds:g} s (stub-timeout-seconds)"
            self._connecting = self._loop.call_later(seconds, self.kill, how)

    def expect(self) -> asyncio.Future[None]:
        """Return a future for the next step of the start, which fails when the stub dies."""
        self._started = self._loop.create_future()
        if self.exited.done():
            self._started.set_exception(StubDied(self.unhealthy(self.exited.result())))
        return self._started

    def use_feed(self, feed: InstanceFeed) -> None:
        """Send batches through another feed."""
        self.feed.close()
        self.feed = feed
        feed.connect(self.connection.requests)

    # -- end -----------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Tell the model that its requests are cancelled, and fail its calls.

        What it still answers is passed on.
        """
        at_stub = self.connection.requests
        for _, _, request in at_stub.left():
            at_stub.cancel(request, True, GIVEN_UP)
        if self._bls_endpoint is not None:
            self._bls_endpoint.give_up()

    async def finalize(self, seconds: float) -> None:
        """Make the stub finalize its model and exit; kill it after ``seconds``."""
        if not self.exited.done():
            self.connection.send_control(Kind.FINALIZE)
            await asyncio.wait([self.exited], timeout=seconds)
        if not self.exited.done():
            how = f"was killed: it had not ended {seconds:g} s after it was told to finalize"
            _logger.warning("%s", self.unhealthy(how))
            self.kill(how)

    def kill(self, why: str | None = None) -> None:
        """Kill the process; ``why`` replaces the reported reason."""
        if self._process is not None:
            self._process.kill(why)

    async def end(self) -> None:
        """Kill the process, if there is one, and wait for its end, within a limit."""
        if self._process is not None:
            self._process.kill()
            await asyncio.wait([self.exited], timeout=REAP_SECONDS)

    def close(self) -> tuple[list[InferRequest], list[InferRequest]]:
        """Release the connections of a dead stub; return its started requests, and the others."""
        self.ready_check.close()
        # Its last responses must not trigger further batches.
        self.feed.close()
        # The stub's end; already closed if a process was started.
        self._theirs.close()
        if self._process is not None:
            # A process that could not be killed may end at any time.
            self._process.exited.remove_done_callback(self._on_exit)
        endpoint, self._bls_endpoint = self._bls_endpoint, None
        if endpoint is not None:
            endpoint.close()
        left = self.connection.close()
        # The connection refers to this run: break the cycle so that memory is freed now.
        del self.connection
        return left

    @property
    def process(self) -> RunningStub | None:
        """Return its process, if that was started."""
        return self._process

    def unhealthy(self, how: str) -> str:
        """Return the error text for requests: how the stub ended."""
        return f"Stub process '{self._instance.name}' is not healthy. It {how}."

    # -- called by the connection and the process ------------------------------------------------

    def on_span(self, number: int, parent: int, span: Span) -> None:
        """Add a span of the model to the trace of one of its requests, if that is not complete yet."""
        trace = self._context.telemetry.traces.find(number)
        if trace is not None and trace.model == self._instance.settings.model:
            trace.add(parent, span)

    def on_connected(self) -> None:
        """Handle the first message: the process runs and has read its settings."""
        if self._connecting is not None:
            self._connecting.cancel()

    def on_completed(self, text: str | None) -> None:
        """Handle the completed configuration."""
        if self._completion is not None:
            self._completion.returned(text)

    def on_ready(self, fd: int | None) -> None:
        """Handle the end of ``initialize``; ``fd``, taken over, is the socket for ``is_ready`` checks."""
        if fd is not None:
            self.ready_check.connect(fd)
        if not self._started.done():
            self._started.set_result(None)

    def on_failed(self, text: str) -> None:
        """Handle a failed ``initialize``."""
        if not self._started.done():
            self._started.set_exception(BridgeError(text, ErrorCode.INTERNAL))

    def on_broken(self, what: str) -> None:
        """Handle a closed or corrupt channel: kill the process."""
        # A dying process closes its channel before it exits: wait for its own exit status.
        if self._process is not None:
            seconds = _LAST_WORDS_SECONDS if what.startswith("closed") else 0.0
            self._loop.call_later(seconds, self._process.kill, f"{what} and was killed")

    def _on_exit(self, future: asyncio.Future[str]) -> None:
        self.on_connected()
        # Its exit may be known before its last messages are read (a load error, responses).
        try:
            self.connection.drain(partial(self._on_end, future.result()))
        except Exception as error:  # noqa: BLE001  (after a bug of ours it has ended, too)
            request_error(error, "look at a dead process's messages")
            self._on_end(future.result())

    def _on_end(self, how: str) -> None:
        if not self.exited.done():
            self.exited.set_result(how)
        if not self._started.done():
            self._started.set_exception(StubDied(self.unhealthy(how)))
