"""One model instance: keeps a stub running for it.

States::

    STOPPED ──start──► STARTING ──ready──► READY ──died──► RESTARTING ──ready──► READY
                          │ failed                            │ failed: back-off, again
                          ▼                                   ▼
                       STOPPED (the load fails)            FAILED (requests are refused)

When a stub dies, the requests that it had started fail; the others are queued again. The first restart
is immediate, later ones follow a back-off that doubles while stubs die without a successful response.
Requests wait during a short back-off; they are refused during a long one, or when the last start failed.
After two recent deaths, a replacement stub is started in advance (`ReplacementStub`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gpubridge.dataplane import InstanceFeed
from gpubridge.engine.supervisor.context import EngineContext
from gpubridge.engine.supervisor.instance_settings import InstanceSettings
from gpubridge.engine.supervisor.ready_check import ReadyCheck
from gpubridge.engine.supervisor.replacement import ReplacementStub
from gpubridge.engine.supervisor.startup import ConfigCompletion
from gpubridge.engine.supervisor.stub_process import next_backoff, was_healthy
from gpubridge.engine.supervisor.stub_run import REAP_SECONDS, StubRun
from gpubridge.engine.supervisor.warmup import warm_up
from gpubridge.errors import BridgeError, StubDied
from gpubridge.request import InferRequest
from gpubridge.telemetry.logs import log_from_stub, request_error
from gpubridge.telemetry.statistics import DeviceWork, ModelStatistics
from gpubridge.transport.messages import Kind

if TYPE_CHECKING:
    from gpubridge.engine.models.dispatcher import Dispatcher

_logger = logging.getLogger(__name__)

_IDLE_SECONDS = 30.0
_FINALIZE_SECONDS = 10.0
_SHORT_BACKOFF_SECONDS = 1.0
_ENDS = 5
_REASON_LETTERS = 4000


class InstanceState(enum.Enum):
    """State of an instance."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


class StubEnd(NamedTuple):
    """The end of a stub, or a start that failed.

    - ``time``: when, in seconds of CLOCK_MONOTONIC.
    - ``reason``: how it ended, or why it did not start.
    - ``output``: the lines that it printed last.
    """

    time: float
    reason: str
    output: Sequence[str]


@dataclass(slots=True)
class EndedRuns:
    """Record of an instance's earlier stubs: GPU copies and waits, the GPU of the last one, its output.

    ``ends``: the latest of them.
    """

    device_work: DeviceWork = field(default_factory=DeviceWork)
    device: str | None = None
    output: Sequence[str] = ()
    ends: deque[StubEnd] = field(default_factory=lambda: deque(maxlen=_ENDS))

    def note(self, reason: str) -> None:
        """Record the end of the last stub, or a start that failed."""
        self.ends.append(StubEnd(time.monotonic(), reason[:_REASON_LETTERS], self.output))


class Instance:
    """A model instance; owns its stub process and the connection to it.

    Its attributes:

    - ``feed``: sends batches to its stub; knows the number in flight and the window.
    - ``fallbacks``: counts of slower paths that its stubs took, by reason.
    - ``last_error``: why the last stub died or did not start.
    - ``waits_for``: the models that its BLS calls wait for, each with the number of those calls.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        index: int,
        listener: Dispatcher,
        context: EngineContext,
    ) -> None:
        self.settings = settings
        self.state = InstanceState.STOPPED
        self.restarts = 0
        self.fallbacks: Counter[str] = Counter()
        self.index = index
        self._listener = listener
        self.feed = InstanceFeed(listener)
        self._context = context
        self._run: StubRun | None = None
        self.waits_for: dict[str, int] = {}
        self._replacement = ReplacementStub(self._start_replacement, self._close, settings.name)
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._ended_runs = EndedRuns()
        self.last_error = ""

    @property
    def ends(self) -> Sequence[StubEnd]:
        """Return the latest ends of its stubs, and starts that failed."""
        return self._ended_runs.ends

    @property
    def run(self) -> StubRun | None:
        """Return its stub; None between two of them."""
        return self._run

    @property
    def name(self) -> str:
        """Return its name, ``{model}_{group}_{index}``."""
        return self.settings.name

    @property
    def counters(self) -> ModelStatistics:
        """Return the counters of its model."""
        return self._listener.counters

    @property
    def ready_check(self) -> ReadyCheck | None:
        """Return the check of its model's ``is_ready``; None unless it is ready and has one."""
        if self._run is None or self.state is not InstanceState.READY:
            return None
        return self._run.ready_check if self._run.ready_check.connected else None

    @property
    def device(self) -> str | None:
        """Return the GPU whose memory its stub can open; that of the last one while it restarts."""
        if self._run is None or self.state is not InstanceState.READY:
            return self._ended_runs.device
        return self._run.connection.device

    @property
    def device_work(self) -> DeviceWork:
        """Return the GPU copies and waits of all its stubs so far."""
        run, ended = self._run, self._ended_runs.device_work
        return ended if run is None else ended.plus(run.connection.device_work())

    # -- life ----------------------------------------------------------------------------------

    def configure(self, settings: InstanceSettings, listener: Dispatcher) -> None:
        """Replace the settings of a draft configuration by those of the completed one."""
        self.settings = settings
        self._listener = listener
        self.feed.listen(listener)

    async def start(self, completion: ConfigCompletion | None = None) -> None:
        """Start the stub and wait until its model is initialized.

        Raises BridgeError: the model's own error when ``initialize`` fails, or the reason of the
        stub's death.
        """
        self.state = InstanceState.STARTING
        try:
            await self._launch(completion)
        except (BridgeError, asyncio.CancelledError):
            self.state = InstanceState.STOPPED
            raise
        self._keeper = asyncio.get_running_loop().create_task(
            self._keep_running(), name=f"keep {self.name}"
        )

    async def stop(self, seconds: float) -> None:
        """Finalize the model and end the stub; kill it after ``seconds``.

        A stub that is still starting is killed at once: it has no model to finalize.
        """
        self._stopping = True
        keeper, self._keeper = self._keeper, None
        replacement = asyncio.get_running_loop().create_task(self._replacement.end(seconds))
        if self.state is InstanceState.READY and self._run is not None:
            await self._run.finalize(seconds)
        elif keeper is not None:
            keeper.cancel()
        await replacement
        if keeper is not None:
            await asyncio.wait([keeper], timeout=REAP_SECONDS)
        self.state = InstanceState.STOPPED

    async def _launch(self, completion: ConfigCompletion | None = None) -> None:
        """Start a stub and wait until it is ready; raises BridgeError."""
        run = self._run = StubRun(self, self.feed, self._context, completion, self._take_notice)
        await self._start(run)

    async def _start(self, run: StubRun) -> None:
        """Run the start of a stub and its warm-up; on failure, end it and raise BridgeError."""
        run.connection.set_log_levels(self._context.telemetry.log.stub_levels)
        arena = self._context.regions.arena(self.settings.model)
        try:
            await run.start(again=self.state is not InstanceState.STARTING)
            await warm_up(self.settings.warmup, arena, run.feed.submit, run.expect)
        except BaseException as error:
            # The model's error is known, or the start was cancelled.
            await run.end()
            _, unstarted = self._close(run)
            for request in unstarted:
                if request.slot is not None:
                    arena.free(request.slot)
            if isinstance(error, Exception):
                raise request_error(error, "start") from error
            raise

    async def _keep_running(self) -> None:
        """Restart the stub whenever it dies, until `stop`; a bug of gpubridge is such a death, too."""
        backoff = 0.0
        while not self._stopping:
            try:
                if self._run is None:
                    await self._restart(backoff)
                else:
                    backoff = await self._live(self._run, backoff)
            except Exception as error:  # noqa: BLE001  (a bug of ours: the instance goes on without)
                backoff = self._next_backoff(backoff)
                await self._end_run(request_error(error, f"run of instance '{self.name}'"))

    async def _live(self, run: StubRun, backoff: float) -> float:
        """Serve until a stub dies, then start another one; return the back-off after that."""
        succeeded = run.connection.requests.succeeded
        self.state = InstanceState.READY
        self.feed.open(self.settings.least_window)
        since = time.monotonic()
        # The levels may have changed while the model was loading.
        self.set_log_levels()
        self._context.devices.join(self)
        self._listener.on_ready(self)
        how = await asyncio.shield(run.exited)
        answered = run.connection.requests.succeeded > succeeded
        # Of a closed run, no reference is left while another one starts.
        del run
        shrunk = self._fail_in_flight(how)
        if self._stopping:
            return backoff
        if was_healthy(time.monotonic() - since, answered=answered):
            backoff = 0.0
        self._replacement.note_death()
        taken = await self._use_replacement()
        # A client caused this death, not the model: no back-off.
        wait = 0.0 if shrunk else backoff
        self._plan_replacement(wait)
        if not taken:
            await self._restart(wait)
        return backoff if shrunk else self._next_backoff(backoff)

    async def _end_run(self, error: BridgeError) -> None:
        """End the stub after a bug of gpubridge, which its started requests get as their error."""
        self._note_end(error.message)
        run = self._run
        if run is None:
            return
        self.state = InstanceState.RESTARTING
        try:
            await run.end()
            self._hand_back(run, error)
        except Exception as another:  # noqa: BLE001  (also ours: another stub is started in any case)
            request_error(another, f"stop of instance '{self.name}'")

    async def _restart(self, backoff: float) -> None:
        """Start stubs until one is ready, or `stop`."""
        failed = False
        while not self._stopping:
            # Requests do not wait for a stub that keeps dying.
            if failed or backoff > _SHORT_BACKOFF_SECONDS:
                self.state = InstanceState.FAILED
                self._listener.dispatch()
            if backoff:
                _logger.warning("instance '%s' restarts in %.1f s", self.name, backoff)
                await asyncio.sleep(backoff)
            try:
                self.restarts += 1
                await self._launch()
            except BridgeError as error:
                self._note_end(error.message)
                text = f"instance '{self.name}' failed to start: {error.message}"
                _logger.error("%s", text)  # noqa: TRY400  (the model's own traceback is in it)
                # The replacement may hold a resource that this start lacks, such as a lock.
                if await self._use_replacement():
                    return
                backoff = self._next_backoff(backoff)
                failed = True
                continue
            _logger.info("instance '%s' is ready again", self.name)
            return

    # -- the replacement stub ------------------------------------------------------------------

    def _plan_replacement(self, delay: float) -> None:
        """Start a replacement stub after ``delay`` if two stubs died recently.

        Not on a GPU, which may lack memory for a second stub, and not with a debug port, which two
        stubs cannot share.
        """
        plain = self.settings.device is None and self.settings.stub.debug_port is None
        if plain and self._replacement.wanted(self._context.backend.spare_stub_seconds):
            self._listener.plan_replacement(self._replacement, delay)

    async def _start_replacement(self) -> StubRun:
        """Start a stub that gets no requests yet; raises BridgeError."""
        feed = InstanceFeed(self._listener)
        run = StubRun(self, feed, self._context, None, self._take_notice)
        await self._start(run)
        return run

    async def _use_replacement(self) -> bool:
        """Continue with the replacement stub; return False if there is none or it failed."""
        run = await self._replacement.take()
        if run is None:
            return False
        self._run = run
        run.use_feed(self.feed)
        self.restarts += 1
        _logger.info("instance '%s' is ready again, on its replacement process", self.name)
        return True

    def _next_backoff(self, seconds: float) -> float:
        return next_backoff(seconds, self._context.backend.restart_backoff_limit_seconds)

    def _take_notice(self, fields: dict[str, Any]) -> None:
        """Log a notice of the stub, and count the fallback that it reports, if any."""
        fallback = fields.get("fallback")
        if fallback is not None:
            self.fallbacks[fallback] += 1
        if fields.get("once") and not self._listener.is_first_warning(fields["once"]):
            return
        log_from_stub(self.settings.model, self.name, fields)

    def _fail_in_flight(self, how: str) -> bool:
        """Fail the started requests of a dead stub and queue the others again.

        Returns whether a client had shrunk memory that the stub used.
        """
        assert self._run is not None
        # Before the client gets the error: it could restore the size then.
        shrunk = self._context.regions.revoke_shrunk(self._run.connection.announced)
        text = self._run.unhealthy(how)
        if not self._stopping:
            _logger.error("%s", text)
            self.state = InstanceState.RESTARTING
        self._note_end(text)
        self._hand_back(self._run, StubDied(text))
        return shrunk

    def _hand_back(self, run: StubRun, error: BridgeError) -> None:
        """Release a dead stub: requests that it had started fail, the others are queued again."""
        lost, unstarted = self._close(run)
        try:
            self._listener.on_death(self, lost, unstarted, error)
        except Exception as bug:
            told = request_error(bug)
            for request in (*lost, *unstarted):
                # Those that are queued again are at no instance.
                if request.instance is not None:
                    request.finish(told.copy())
            raise

    def _note_end(self, reason: str) -> None:
        """Note why a run ended, with what it printed last; one that could not start is closed already."""
        self.last_error = reason
        if self._run is not None:
            self._keep_output(self._run)
        self._ended_runs.note(reason)

    def _keep_output(self, run: StubRun) -> None:
        self._ended_runs.output = () if run.process is None else tuple(run.process.last_lines)

    def _close(self, run: StubRun) -> tuple[list[InferRequest], list[InferRequest]]:
        """Release a dead stub; return the requests that it had started, and the others."""
        if run is self._run:
            self._ended_runs.device = run.connection.device or self._ended_runs.device
            self._keep_output(run)
            self._run = None
            self.waits_for.clear()
        self._ended_runs.device_work.add(run.connection.device_work())
        return run.close()

    # -- work ----------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Return whether no further stub will be started."""
        return self._stopping or self.state is InstanceState.STOPPED

    def cancel(self, request: InferRequest, *, running_only: bool = False) -> None:
        """Withdraw a request that the stub has not started; notify the model of one that it has."""
        if self._run is not None and request.instance is self._run.connection.requests:
            self._run.connection.requests.cancel(request, running_only)

    def give_up(self) -> None:
        """Tell the model that its requests are cancelled; what it still answers is passed on."""
        if self._run is not None:
            self._run.give_up()

    def describe_full(self) -> str:
        """Return why the stub takes no request, as all its tickets are used; log it, once per stub."""
        if self._run is None:
            return f"model instance '{self.name}' has ended"
        text = self._run.connection.describe_kept(self.name)
        if not self._run.warned_full:
            self._run.warned_full = True
            _logger.warning("%s", text)
        return text

    def set_log_levels(self) -> None:
        """Send the enabled log levels to the stub."""
        if self._run is not None:
            self._run.connection.set_log_levels(self._context.telemetry.log.stub_levels)

    def disable_device_exchange(self, reason: str) -> None:
        """Make the stub send its tensors in host memory: no other process opens its device memory."""
        if (
            self._run is not None
            and self._run.connection.device
            and self.state is InstanceState.READY
        ):
            self._run.connection.send_control(Kind.DEVICE_ALONE, reason=reason)

    def maintain(self) -> None:
        """Release memory that the stub no longer keeps, and expire an unneeded replacement."""
        if not self._replacement.wanted(self._context.backend.spare_stub_seconds):
            self._replacement.expire(_FINALIZE_SECONDS)
        if self._run is None or self.state is not InstanceState.READY:
            return
        self._run.connection.maintain(_IDLE_SECONDS)

    def check_time_limit(self) -> None:
        """Kill the stub if an ``execute`` exceeds the time limit, or none begins within it."""
        timeout = self.settings.timeout
        if timeout is None or self._run is None:
            return
        what = self._run.connection.overdue(timeout)
        if what is not None:
            self._run.kill(f"was killed: {what} longer than execute-timeout-seconds={timeout:g}")
