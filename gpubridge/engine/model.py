"""One version of a model: the interface for endpoints, and the implementation by stubs."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.engine.context import EngineContext
from gpubridge.engine.devices.staging import DeviceStaging
from gpubridge.engine.dispatcher import Dispatcher, Submission
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.instance import Instance, InstanceState
from gpubridge.engine.instance_settings import InstanceSettings, debugged, place_instances
from gpubridge.engine.ready_check import ReadyCheck
from gpubridge.engine.starting import Completion, start_all
from gpubridge.engine.tracing import Origin, RequestTracing
from gpubridge.engine.warmup import WarmupSample, warmup_samples
from gpubridge.request import InferRequest, InferResponse
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.settings import MetricsSettings
from gpubridge.telemetry.statistics import (
    FIRST_RESPONSE_BUCKETS_MS,
    LatencyHistogram,
    LatencyWindow,
    ModelStatistics,
)
from gpubridge.transport.messages import Completes

_logger = logging.getLogger(__name__)

_FINALIZE_SECONDS = 1.0
"""Least time for ``finalize``, when answering requests has used up the time."""

_FINALIZE_LIMIT = 30.0
"""Most time for ``finalize``."""


class Model(ABC):
    """A loaded (or loading) version of a model, whatever it is made of."""

    def __init__(self, config: ModelConfig, version: int, context: EngineContext) -> None:
        self.config = config
        self.name = config.name
        self.version = version
        telemetry = context.telemetry
        self.statistics = _new_statistics(config, version, telemetry.metrics)
        self.tracing = RequestTracing(telemetry.traces, config.name, version)
        self.traces = telemetry.traces
        self.instances: list[Instance] = []

    @abstractmethod
    async def load(self) -> None:
        """Become ready; raises BridgeError, and leaves nothing behind, when that cannot be."""

    @abstractmethod
    async def unload(self, seconds: float | None) -> None:
        """Answer what is pending, within ``seconds`` if that is said, and give everything back."""

    @abstractmethod
    def hurry(self, seconds: float) -> None:
        """Bound an unload that goes on: what is not answered within ``seconds`` will not be."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Return whether a request would be executed now."""

    @abstractmethod
    def ready_checks(self) -> list[ReadyCheck]:
        """Return whom to ask, besides, whether it is ready: what models themselves say."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests that are not answered yet."""

    @property
    def queued(self) -> int:
        """Requests that are at no stub yet."""
        return 0

    @property
    @abstractmethod
    def executed_by(self) -> Collection[str]:
        """The models whose instances execute its requests."""

    @property
    def device(self) -> str | None:
        """The GPU on which all its instances are; None where they are not on one."""
        return None

    submit: Submission
    """Takes a request over: its slot is freed, its outcome comes by ``on_done``."""

    def _measured(self, request: InferRequest) -> None:
        """Measure how long the client waits for the first response, if that is wanted."""
        if self.statistics.first_response is not None:
            _FirstResponse(self.statistics.first_response, request)

    def tell_log_levels(self) -> None:
        """Have the stubs know which levels are logged now."""
        for instance in self.instances:
            instance.tell_log_levels()

    def housekeep(self) -> None:
        """Called every few seconds."""
        for instance in self.instances:
            instance.housekeep()

    def check_time_limit(self) -> None:
        """Called often when executes have a time limit."""
        for instance in self.instances:
            instance.check_time_limit()


class StubModel(Model):
    """A model version that stubs execute; owns its instances and its queued requests.

    - ``config``: the validated configuration, or a draft that the model completes when it is
      loaded.
    - ``finish``: makes a draft and what the model returned for it the whole configuration; raises
      BridgeError.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        directory: Path,
        context: EngineContext,
        finish: Callable[[str | None], ModelConfig],
    ) -> None:
        super().__init__(config, version, context)
        self._directory = directory
        self._context = context
        self._finish = finish
        # While the model completes its configuration, there is nothing to schedule.
        self._use_dispatcher(config.unscheduled() if config.draft else config)
        self._staging = DeviceStaging(
            context.devices, context.regions.arena(config.name), self.statistics
        )
        self._stopping = False
        self._drained = asyncio.Event()
        self._deadline: float | None = None

    # -- life ----------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start every instance; when one fails, none is left; raises BridgeError."""
        try:
            environment = await self._context.environments.of_model(self._directory, self.config)
            entries = await self._settings(environment)
        except Exception:
            # There is nothing else yet that an unload would give back.
            self._dispatcher.close()
            raise
        completion = None
        if self.config.draft:
            completion = Completion(partial(self._complete, environment))
        self.instances = [
            Instance(entry, index, self._dispatcher, self._context)
            for index, entry in enumerate(entries)
        ]
        self._dispatcher.serve(self.instances)
        try:
            failures = await start_all(self.instances, completion)
        except asyncio.CancelledError:
            # Some may be up already; nobody else knows of them.
            await self.unload(0.0)
            raise
        if failures:
            await self.unload(0.0)
            raise failures[0]

    async def unload(self, seconds: float | None) -> None:
        """Answer what is queued, then finalize and stop every instance; all of it within ``seconds``.

        Only what is left of that time goes to the finalizing, but a moment in any case. With None,
        answering takes as long as it takes, unless :meth:`hurry` is called.
        """
        self._stopping = True
        clock = asyncio.get_running_loop().time
        begin = clock()
        await self._staging.finished()
        drained = self._drained = asyncio.Event()
        self._dispatcher.stop(drained.set)
        if seconds is not None:
            self.hurry(seconds)
        await drained.wait()
        if self.pending:
            _logger.warning(
                "model '%s' still has %d requests after %.0f s",
                self.name,
                self.pending,
                clock() - begin,
            )
        unloaded = f"Request for model '{self.name}' cannot be served: it is being unloaded"
        self._dispatcher.refuse_queued(unloaded)
        left = _FINALIZE_LIMIT
        if self._deadline is not None:
            left = max(self._deadline - clock(), _FINALIZE_SECONDS)
        await asyncio.gather(*(instance.stop(left) for instance in self.instances))
        self._dispatcher.refuse_queued(unloaded)
        self._dispatcher.close()

    def hurry(self, seconds: float) -> None:
        """Bound an unload that goes on: what is not answered within ``seconds`` will not be."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + seconds
        loop.call_later(seconds, self._drained.set)

    async def _complete(self, environment: StubEnvironment, returned: str | None) -> None:
        """Go on with the configuration that the model returned, if it can be served."""
        self.config = await self._context.threads.run(
            f"reading what model '{self.name}' made of its configuration",
            partial(self._finish, returned),
        )
        former = self._dispatcher
        self._use_dispatcher(self.config)
        former.close()
        self._dispatcher.serve(self.instances)
        for instance, entry in zip(self.instances, await self._settings(environment), strict=True):
            instance.configure(entry, self._dispatcher)

    def _use_dispatcher(self, config: ModelConfig) -> None:
        arena = self._context.regions.arena(self.name)
        self._dispatcher = Dispatcher(config, arena, self.statistics, self.tracing)
        measured = self.statistics.first_response is not None
        self.submit = self._dispatcher.submission(self._prepare, self.traces, measured)

    async def _settings(self, environment: StubEnvironment) -> list[InstanceSettings]:
        """Return what each instance needs to know, by the configuration as it is now."""
        warmup: Sequence[WarmupSample] = ()
        if not self.config.draft:
            warmup = await self._context.threads.run(
                f"reading the warm-up of model '{self.name}'",
                partial(warmup_samples, self.config, self._directory),
            )
        settings = await self._context.threads.run(
            f"placing the instances of model '{self.name}'",
            partial(
                place_instances,
                self.config,
                self.version,
                self._directory,
                environment,
                warmup,
                self._context,
            ),
        )
        for index, entry in enumerate(settings):
            here = Completes.ELSEWHERE if index else Completes.HERE
            entry.stub["completion"] = here if self.config.draft else Completes.NOWHERE
        port = self._context.settings.debug_ports.get(self.name)
        return settings if port is None else debugged(settings, port)

    # -- state ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether a request would be executed now: some instance is up."""
        return not self._stopping and any(
            instance.state is InstanceState.READY for instance in self.instances
        )

    def ready_checks(self) -> list[ReadyCheck]:
        """Return whom to ask, besides: each instance that is up and whose model has ``is_ready``."""
        up = [each for each in self.instances if each.state is InstanceState.READY]
        return [each.ready_check for each in up if each.ready_check.connected]

    @property
    def pending(self) -> int:
        """Requests that are queued or at a stub."""
        return self._dispatcher.pending

    @property
    def queued(self) -> int:
        """Requests that are at no stub yet."""
        return self._dispatcher.queued

    @property
    def executed_by(self) -> Collection[str]:
        """Itself."""
        return (self.name,)

    @property
    def device(self) -> str | None:
        """The GPU on which all its instances are; None where they are not on one."""
        devices = {instance.device for instance in self.instances}
        return devices.pop() if len(devices) == 1 else None

    # -- work ----------------------------------------------------------------------------------

    def _prepare(self, request: InferRequest, origin: Origin | None) -> bool:
        """Do what some requests need before they are queued; returns False where they are not."""
        try:
            return self._is_prepared(request, origin)
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            self._dispatcher.fail_new(request, request_error(error))
            return False

    def _is_prepared(self, request: InferRequest, origin: Origin | None) -> bool:
        if self.traces.active:
            self.tracing.begin(request, origin)
            self.tracing.tell(request)
        self._measured(request)
        if request.ranges is not None and self._staging.possible:
            device = self.device
            if self._staging.needed(request, device):
                self._staging.begin(request, device, self._enqueue)
                return False
        return True

    def _enqueue(self, request: InferRequest) -> None:
        # Its dispatcher may be another by now.
        self._dispatcher.enqueue(request)


def _new_statistics(config: ModelConfig, version: int, metrics: MetricsSettings) -> ModelStatistics:
    """Make the statistics of a model version, with what the server's metrics need of it."""
    window = LatencyWindow() if metrics.summary_latencies else None
    histogram = None
    if metrics.histogram_latencies:
        histogram = LatencyHistogram(config.first_response_buckets or FIRST_RESPONSE_BUCKETS_MS)
    return ModelStatistics(config.name, version, config.metric_tags, window, histogram)


class _FirstResponse:
    """Stands between the model and who waits for a request's responses, until the first comes.

    Errors are not counted.
    """

    __slots__ = ("_began", "_histogram", "_on_done", "_on_partial", "_waits")

    def __init__(self, histogram: LatencyHistogram, request: InferRequest) -> None:
        self._histogram = histogram
        self._began = time.monotonic_ns()
        self._waits = True
        self._on_done = request.on_done
        self._on_partial = request.on_partial
        request.on_done = self._finish
        if request.on_partial is not None:
            request.on_partial = self._respond

    def _respond(self, outcome: Any) -> None:
        self._measure(outcome)
        if self._on_partial is not None:
            self._on_partial(outcome)

    def _finish(self, outcome: Any) -> None:
        self._measure(outcome)
        if self._on_done is not None:
            self._on_done(outcome)

    def _measure(self, outcome: Any) -> None:
        if self._waits and isinstance(outcome, InferResponse):
            self._waits = False
            self._histogram.observe(time.monotonic_ns() - self._began)
