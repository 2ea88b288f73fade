"""One model instance: keeps a stub running for it, and hands it requests within a window.

States::

    STOPPED ──start──► STARTING ──ready──► READY ──died──► RESTARTING ──ready──► READY
                          │ failed                            │ failed: back-off, again
                          ▼                                   ▼
                       STOPPED (the load fails)            FAILING (requests are refused)

A stub that dies takes the requests it had started with it; the others are sent again. It is started
anew at once the first time, then after a back-off that doubles while stubs die without a good answer
between. Requests wait while the back-off is short; they are refused while it is long, or when the last
stub could not even start. Of a model whose stubs died twice of late, one is started ahead (`SpareStub`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from gpubridge.dataplane import InstanceFeed, ModelCounters
from gpubridge.engine.context import EngineContext
from gpubridge.engine.instance_settings import InstanceSettings
from gpubridge.engine.ready_check import ReadyCheck
from gpubridge.engine.spare_stub import SpareStub
from gpubridge.engine.starting import Completion
from gpubridge.engine.stub_process import next_backoff, was_healthy
from gpubridge.engine.stub_run import REAP_SECONDS, StubRun
from gpubridge.engine.warmup import warm_up
from gpubridge.errors import BridgeError, StubDied
from gpubridge.request import InferRequest
from gpubridge.telemetry.logs import log_from_stub, request_error
from gpubridge.telemetry.statistics import DeviceWork
from gpubridge.transport.messages import Kind

if TYPE_CHECKING:
    from gpubridge.engine.dispatcher import Dispatcher

_logger = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0
_FINALIZE_SECONDS = 10.0
_SHORT_BACKOFF_SECONDS = 1.0


class InstanceState(enum.Enum):
    """State of an instance."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILING = "failing"


class Instance:
    """A model instance; owns its stub process and the link to it.

    Its attributes:

    - ``feed``: leads batches to its stub; says how many are there, and how many may be.
    - ``fallbacks``: how often its stubs took a slower way, by reason.
    - ``waits_for``: the models that its calls wait for, each with the number of those calls.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        index: int,
        listener: Dispatcher,
        context: EngineContext,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.state = InstanceState.STOPPED
        self.restarts = 0
        self.fallbacks: Counter[str] = Counter()
        self.index = index
        self._listener = listener
        self.feed = InstanceFeed(listener)
        self._context = context
        self._log = context.telemetry.log
        self._loop = asyncio.get_running_loop()
        self._run: StubRun | None = None
        self.waits_for: dict[str, int] = {}
        self._no_check = ReadyCheck(self.name)
        self._spare = SpareStub(self._start_spare, self._close, self.name)
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._dead_work = DeviceWork()
        self._last_error = ""
        self._said_full = False

    @property
    def counters(self) -> ModelCounters:
        """Counts the requests of its model."""
        return self._listener.counters

    @property
    def ready_check(self) -> ReadyCheck:
        """Asks its model's ``is_ready``, if it has one."""
        return self._no_check if self._run is None else self._run.ready_check

    @property
    def device(self) -> str | None:
        """The GPU whose memory its stub can be handed."""
        return None if self._run is None else self._run.link.device

    @property
    def device_work(self) -> DeviceWork:
        """Return the work that its stubs have done on their GPU."""
        run = self._run
        return self._dead_work if run is None else self._dead_work.plus(run.link.device_work())

    # -- life ----------------------------------------------------------------------------------

    def configure(self, settings: InstanceSettings, listener: Dispatcher) -> None:
        """Run by the settings of the complete configuration, where it began by those of a draft."""
        self.settings = settings
        self._listener = listener
        self.feed.listen(listener)

    async def start(self, completion: Completion | None = None) -> None:
        """Start the stub and wait until its model is initialized, once its configuration is complete.

        Raises BridgeError with the model's own error when ``initialize`` fails, or how the stub
        died.
        """
        self.state = InstanceState.STARTING
        try:
            await self._launch(completion)
        except (BridgeError, asyncio.CancelledError):
            self.state = InstanceState.STOPPED
            raise
        self._keeper = self._loop.create_task(self._keep_running(), name=f"keep {self.name}")

    async def stop(self, seconds: float) -> None:
        """Have the model finalized and end the stub; it is killed after ``seconds``.

        A stub that is not ready (it is being restarted) is killed at once: there is no initialized
        model to finalize.
        """
        self._stopping = True
        keeper, self._keeper = self._keeper, None
        spare = self._loop.create_task(self._spare.end(seconds))
        if self.state is InstanceState.READY and self._run is not None:
            await self._run.finalize(seconds)
        elif keeper is not None:
            keeper.cancel()
        await spare
        if keeper is not None:
            await asyncio.wait([keeper], timeout=REAP_SECONDS)
        self.state = InstanceState.STOPPED

    async def _launch(self, completion: Completion | None = None) -> None:
        """Start one stub process; returns when it is ready, raises when it is not going to be."""
        run = self._run = StubRun(self, self.feed, self._context, completion, self._take_log)
        self._said_full = False
        await self._start(run)

    async def _start(self, run: StubRun) -> None:
        """Start a stub process; returns when it is ready, raises when it is not going to be."""
        run.link.tell_log_levels(self._log.stub_levels)
        arena = self._context.regions.arena(self.settings.stub["name"])
        try:
            await run.start()
            await warm_up(self.settings.warmup, arena, run.feed.submit, run.expect)
        except BaseException as error:
            # What the model raised is known, or nobody wants this stub any more.
            await run.end()
            _, unstarted = self._close(run)
            for request in unstarted:
                if request.slot is not None:
                    arena.free(request.slot)
            if isinstance(error, Exception):
                raise request_error(error, "start") from error
            raise

    async def _keep_running(self) -> None:
        """Wait for the stub's death, settle its debts, start the next; until told to stop."""
        backoff = 0.0
        while True:
            assert self._run is not None
            run, exited = self._run, self._run.exited
            succeeded = run.link.requests.succeeded
            self.state = InstanceState.READY
            self.feed.open(self.settings.least_window)
            since = time.monotonic()
            # They may have changed while the model was loaded.
            self.tell_log_levels()
            self._context.devices.join(self)
            self._listener.on_up(self)
            how = await asyncio.shield(exited)
            answered = run.link.requests.succeeded > succeeded
            del run
            shrunk = self._bury(how)
            if self._stopping:
                return
            if was_healthy(time.monotonic() - since, answered=answered):
                backoff = 0.0
            self._spare.note_death()
            taken = await self._take_spare()
            # A death by a client's doing says nothing of the model.
            wait = 0.0 if shrunk else backoff
            self._plan_spare(wait)
            if not taken and not await self._restart(wait):
                return
            if not shrunk:
                backoff = self._next_backoff(backoff)

    async def _restart(self, backoff: float) -> bool:
        """Start a new stub until one is ready; returns False when told to stop meanwhile."""
        failed = False
        while not self._stopping:
            # Nobody shall wait long for a stub that keeps dying.
            if failed or backoff > _SHORT_BACKOFF_SECONDS:
                self.state = InstanceState.FAILING
                self._listener.on_room()
            if backoff:
                _logger.warning("instance '%s' starts again in %.1f s", self.name, backoff)
                await asyncio.sleep(backoff)
            try:
                self.restarts += 1
                await self._launch()
            except BridgeError as error:
                self._last_error = error.message
                text = f"instance '{self.name}' failed to start: {error.message}"
                _logger.error("%s", text)  # noqa: TRY400  (the model's own traceback is in it)
                # It may have what this one has not got, a lock say.
                if await self._take_spare():
                    return True
                backoff = self._next_backoff(backoff)
                failed = True
                continue
            _logger.info("instance '%s' runs again", self.name)
            return True
        return False

    # -- a stub started ahead ------------------------------------------------------------------

    def _plan_spare(self, delay: float) -> None:
        """Have a stub started ahead, after ``delay``, if others died twice of late.

        A GPU may not have memory for one more, nor can two wait for a debugger at one port.
        """
        plain = self.settings.device is None and "debug_port" not in self.settings.stub
        if plain and self._spare.wanted(self._context.backend.spare_stub_seconds):
            self._listener.plan_spare(self._spare, delay)

    async def _start_spare(self) -> StubRun:
        """Start a stub that nobody sends requests yet; raises BridgeError."""
        feed = InstanceFeed(self._listener)
        run = StubRun(self, feed, self._context, None, self._take_log)
        await self._start(run)
        return run

    async def _take_spare(self) -> bool:
        """Let the stub that was started ahead take over, if there is one that is well."""
        run = await self._spare.take()
        if run is None:
            return False
        self._run, self._said_full = run, False
        run.lead_by(self.feed)
        self.restarts += 1
        _logger.info("instance '%s' runs again, on a process that was started ahead", self.name)
        return True

    def _next_backoff(self, seconds: float) -> float:
        return next_backoff(seconds, self._context.backend.restart_backoff_limit_seconds)

    def _take_log(self, fields: dict[str, Any]) -> None:
        """Write a line of the stub's; count it, if it tells of a fallback. Its fields are checked."""
        fallback = fields.get("fallback")
        if fallback is not None:
            self.fallbacks[fallback] += 1
        if fields.get("once") and not self._listener.is_first(fields["once"]):
            return
        log_from_stub(self.settings.stub["name"], self.name, fields)

    def _bury(self, how: str) -> bool:
        """Settle what a dead stub leaves: started requests fail, the others are orphans.

        Returns whether a client had shrunk memory that the stub used.
        """
        assert self._run is not None
        # Before the client hears of the death, and may grow it again.
        shrunk = self._context.regions.revoke_shrunk(self._run.link.announced)
        text = self._run.unhealthy(how)
        self._last_error = text
        if not self._stopping:
            _logger.error("%s", text)
            self.state = InstanceState.RESTARTING
        lost, unstarted = self._close(self._run)
        self._listener.on_death(self, lost, unstarted, StubDied(text))
        return shrunk

    def _close(self, run: StubRun) -> tuple[list[InferRequest], list[InferRequest]]:
        """Let go of a dead stub; returns the requests that it had started, and had not."""
        if run is self._run:
            self._run = None
            self.waits_for.clear()
        self._dead_work.add(run.link.device_work())
        return run.close()

    # -- work ----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return whether no further stub will be started."""
        return self._stopping or self.state is InstanceState.STOPPED

    @property
    def last_error(self) -> str:
        """Why the last stub died or did not start."""
        return self._last_error

    def cancel(self, request: InferRequest, *, running_only: bool = False) -> None:
        """Spare the stub a request that it has not started; tell its model of one that it has."""
        if self._run is not None and request.instance is self._run.link.requests:
            self._run.link.requests.cancel(request, running_only)

    def say_full(self) -> None:
        """Log, once for each stub, that requests wait since what it keeps leaves no ticket for one."""
        if self._run is not None and not self._said_full:
            self._said_full = True
            _logger.warning("%s", self._run.link.describe_kept(self.name))

    def tell_log_levels(self) -> None:
        """Have the stub know which levels are logged now."""
        if self._run is not None:
            self._run.link.tell_log_levels(self._log.stub_levels)

    def keep_device_alone(self, reason: str) -> None:
        """Have the stub use its GPU alone: nobody takes tensors there from it any more."""
        if self._run is not None and self._run.link.device and self.state is InstanceState.READY:
            self._run.link.tell(Kind.DEVICE_ALONE, reason=reason)

    def housekeep(self) -> None:
        """Called now and then: settle kept memory, and end an execute that takes too long."""
        if not self._spare.wanted(self._context.backend.spare_stub_seconds):
            self._spare.expire(_FINALIZE_SECONDS)
        if self._run is None or self.state is not InstanceState.READY:
            return
        self._run.link.housekeep(_IDLE_SECONDS)

    def check_time_limit(self) -> None:
        """Kill the stub when its ``execute`` has run longer than allowed, or does not begin."""
        timeout = self.settings.timeout
        if timeout is None or self._run is None:
            return
        what = self._run.link.overdue(timeout)
        if what is not None:
            self._run.kill(f"was killed: {what} longer than execute-timeout-seconds={timeout:g}")
