"""One version of a model: the interface for endpoints, and the version that stubs execute."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpubridge.config import ModelConfig
from gpubridge.engine.devices.staging import DeviceStaging
from gpubridge.engine.environments.provider import StubEnvironment
from gpubridge.engine.models.dispatcher import Dispatcher, Submission
from gpubridge.engine.models.tracing import Origin, RequestTracing
from gpubridge.engine.response_cache import CachedSubmission
from gpubridge.engine.supervisor.context import EngineContext
from gpubridge.engine.supervisor.instance import Instance, InstanceState
from gpubridge.engine.supervisor.instance_settings import (
    InstanceSettings,
    debugged,
    place_instances,
)
from gpubridge.engine.supervisor.ready_check import ReadyCheck
from gpubridge.engine.supervisor.startup import ConfigCompletion, start_all
from gpubridge.engine.supervisor.warmup import WarmupSample, warmup_samples
from gpubridge.errors import counted
from gpubridge.request import InferRequest, InferResponse
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.settings import MetricsSettings
from gpubridge.telemetry.statistics import (
    FIRST_RESPONSE_BUCKETS_MS,
    DeviceWork,
    LatencyHistogram,
    LatencyWindow,
    ModelStatistics,
)

_logger = logging.getLogger(__name__)

_FINALIZE_SECONDS = 3.0
"""Least time for cancelled requests and ``finalize``, when answering requests has used up the time."""

_FINALIZE_LIMIT = 30.0
"""Most time for ``finalize``."""


class Model(ABC):
    """A loaded or loading version of a model: stubs or an ensemble execute it.

    ``members``: the models that it sends requests to until it is unloaded: those of an ensemble's steps.
    """

    members: Sequence[Model] = ()

    def __init__(self, config: ModelConfig, version: int, context: EngineContext) -> None:
        self.config = config
        self.name = config.name
        self.version = version
        self._context = context
        telemetry = context.telemetry
        self.statistics = _new_statistics(config, version, telemetry.metrics)
        self.tracing = RequestTracing(telemetry.traces, config.name, version)
        self.traces = telemetry.traces
        self.instances: list[Instance] = []

    @abstractmethod
    async def unload(self, deadline: float | None) -> None:
        """Complete pending requests, until ``deadline`` unless None, then release everything.

        ``deadline``: of the event loop's clock.
        """

    @abstractmethod
    def set_deadline(self, deadline: float) -> None:
        """Limit an unload in progress: requests that are pending then fail."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Return whether requests are executed now."""

    @abstractmethod
    def ready_checks(self) -> list[ReadyCheck]:
        """Return the checks of the models' own ``is_ready``, which count beside `ready`."""

    @property
    def whole(self) -> bool:
        """Return whether every instance is ready: none waits to be started again."""
        return all(instance.state is InstanceState.READY for instance in self.instances)

    @property
    @abstractmethod
    def pending(self) -> int:
        """Return the number of requests without a last response."""

    @property
    def queued(self) -> int:
        """Return the number of requests that are at no stub yet."""
        return 0

    @property
    def waiting(self) -> int:
        """Return the number of requests whose execution has not begun."""
        return 0

    @property
    @abstractmethod
    def executed_by(self) -> Collection[str]:
        """Return the models whose instances execute its requests."""

    @property
    def device(self) -> str | None:
        """Return the GPU of all its instances; None unless they are on one and the same GPU."""
        return None

    @property
    def restarts(self) -> int:
        """Return the number of restarts of its stubs."""
        return sum(instance.restarts for instance in self.instances)

    @property
    def fallbacks(self) -> Counter[str]:
        """Return the counts of slower paths that were taken, by reason."""
        counted = Counter(self.config.fallbacks) + self.statistics.fallbacks
        for instance in self.instances:
            counted += instance.fallbacks
        return counted

    @property
    def device_work(self) -> DeviceWork:
        """Return the GPU copies and waits of the server and all stubs for it."""
        work = DeviceWork()
        work.include(self.statistics.device_work)
        for instance in self.instances:
            work.include(instance.device_work)
        return work

    submit: Submission
    """Submits a request: frees its slot and calls its ``on_done``."""

    async def _looked_up(self) -> None:
        """Wait for requests that are on their way through the response cache."""
        if isinstance(self.submit, CachedSubmission):
            await self.submit.finished()

    def _cached(self, submit: Submission) -> Submission:
        """Return the submission that looks requests up in the response cache first, if it is used."""
        context = self._context
        if context.cache is None or not self.config.message.response_cache.enable:
            return submit
        self.statistics.caches = True
        return CachedSubmission(context.cache, self, submit, context.regions.arena, context.workers)

    def begin(self, request: InferRequest, origin: Origin | None) -> None:
        """Begin the trace of a request, and measure the time to its first response, if enabled."""
        if self.traces.active:
            self.tracing.begin(request, origin)
        if self.statistics.first_response is not None:
            _FirstResponse(self.statistics.first_response, request)

    def set_log_levels(self) -> None:
        """Send the enabled log levels to the stubs."""
        for instance in self.instances:
            instance.set_log_levels()

    def maintain(self) -> None:
        """Release idle memory; called every few seconds."""
        for instance in self.instances:
            instance.maintain()

    def check_time_limit(self) -> None:
        """Enforce the time limit of ``execute``; called often if there is one."""
        for instance in self.instances:
            instance.check_time_limit()


class StubModel(Model):
    """A model version that stubs execute; owns its instances and its queued requests.

    - ``config``: the validated configuration, or a draft that the model completes during load.
    - ``finish``: merges a draft with the configuration that the model returned; raises BridgeError.
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
        self._finish = finish
        # A draft has no scheduler settings yet, and no requests.
        self._use_dispatcher(config.unscheduled() if config.draft else config)
        self._staging = DeviceStaging(
            context.devices, context.regions.arena(config.name), self.statistics
        )
        # When its unload began.
        self._stopped: float | None = None
        self._drained = asyncio.Event()
        self._deadline: float | None = None

    # -- life ----------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start every instance; if one fails, stop all, release everything and raise BridgeError."""
        try:
            environment = await self._context.environments.of_model(self._directory, self.config)
            entries = await self._settings(environment)
        except Exception:
            # Nothing else exists yet that `unload` would release.
            self._dispatcher.close()
            raise
        completion = None
        if self.config.draft:
            completion = ConfigCompletion(partial(self._complete, environment))
        self.instances = [
            Instance(entry, index, self._dispatcher, self._context)
            for index, entry in enumerate(entries)
        ]
        self._dispatcher.serve(self.instances)
        try:
            failures = await start_all(self.instances, completion)
        except asyncio.CancelledError:
            # Instances that are already up have no other owner.
            await self.unload(0.0)
            raise
        if failures:
            await self.unload(0.0)
            raise failures[0]

    async def unload(self, deadline: float | None) -> None:
        """Complete queued requests, then finalize and stop every instance, until ``deadline``.

        Finalizing gets the rest of that time, but at least three seconds, in which requests that are
        not answered are cancelled. None sets no limit until :meth:`set_deadline` is called.
        """
        clock = asyncio.get_running_loop().time
        self._stopped = clock()
        await self._looked_up()
        await self._staging.finished()
        self._dispatcher.stop(self._drained.set)
        if deadline is not None:
            self.set_deadline(deadline)
        await self._drained.wait()
        unloaded = f"Request for model '{self.name}' cannot be served: it is being unloaded"
        self._dispatcher.refuse_queued(unloaded)
        left = _FINALIZE_LIMIT
        if self._deadline is not None:
            left = max(self._deadline - clock(), _FINALIZE_SECONDS)
        await asyncio.gather(*(instance.stop(left) for instance in self.instances))
        self._dispatcher.refuse_queued(unloaded)
        self._dispatcher.close()

    def set_deadline(self, deadline: float) -> None:
        """Limit an unload in progress: requests that are pending then are given up.

        Those of all models with this deadline in one turn of the loop, before any of these is finalized
        or refuses a call of another one.
        """
        self._deadline = deadline
        asyncio.get_running_loop().call_at(deadline, self._give_up)

    def _give_up(self) -> None:
        if self._stopped is None or self._drained.is_set():
            # Not yet: it waits for the end of an ensemble that uses it. Or not any more.
            return
        seconds = asyncio.get_running_loop().time() - self._stopped
        pending = counted(self.pending, "request")
        _logger.warning("model '%s' still has %s after %.0f s", self.name, pending, seconds)
        for instance in self.instances:
            instance.give_up()
        self._drained.set()

    async def _complete(self, environment: StubEnvironment, returned: str | None) -> None:
        """Apply the configuration that the model returned, if it can be served."""
        self.config = await self._context.threads.run(
            f"reading the completed configuration of model '{self.name}'",
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
        self.submit = self._cached(
            self._dispatcher.submission(self._prepare, self.traces.sampling, measured)
        )

    async def _settings(self, environment: StubEnvironment) -> list[InstanceSettings]:
        """Return the settings of each instance by the current configuration."""
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
        port = self._context.settings.instances.debug_ports.get(self.name)
        return settings if port is None else debugged(settings, port)

    # -- state ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether requests are executed now: some instance is ready."""
        return self._stopped is None and any(
            instance.state is InstanceState.READY for instance in self.instances
        )

    def ready_checks(self) -> list[ReadyCheck]:
        """Return the checks of ready instances whose model has ``is_ready``."""
        checks = [instance.ready_check for instance in self.instances]
        return [check for check in checks if check is not None]

    @property
    def pending(self) -> int:
        """Return the number of requests that are queued or at a stub."""
        return self._dispatcher.pending

    @property
    def queued(self) -> int:
        """Return the number of requests that are at no stub yet."""
        return self._dispatcher.queued

    @property
    def waiting(self) -> int:
        """Return the number of requests that are queued, or at a stub that has not begun them."""
        return self.queued + sum(instance.feed.unstarted for instance in self.instances)

    @property
    def executed_by(self) -> Collection[str]:
        """Return the model's own name."""
        return (self.name,)

    @property
    def device(self) -> str | None:
        """Return the GPU of all its instances; None unless they are on one and the same GPU."""
        devices = {instance.device for instance in self.instances}
        return devices.pop() if len(devices) == 1 else None

    # -- work ----------------------------------------------------------------------------------

    def _prepare(self, request: InferRequest, origin: Origin | None) -> bool:
        """Prepare a request for the queue; return False if it failed or is queued later."""
        try:
            return self._is_prepared(request, origin)
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            self._dispatcher.fail_new(request, request_error(error))
            return False

    def _is_prepared(self, request: InferRequest, origin: Origin | None) -> bool:
        self.begin(request, origin)
        self.tracing.tell(request)
        if request.ranges is not None and self._staging.possible:
            device = self.device
            if self._staging.needed(request, device):
                self._staging.begin(request, device, self._enqueue)
                return False
        return True

    def _enqueue(self, request: InferRequest) -> None:
        # The dispatcher may have been replaced since the request was prepared.
        self._dispatcher.enqueue(request)


def _new_statistics(config: ModelConfig, version: int, metrics: MetricsSettings) -> ModelStatistics:
    """Make the statistics of a model version with the latency metrics that are enabled."""
    window = LatencyWindow() if metrics.summary_latencies else None
    histogram = None
    if metrics.histogram_latencies:
        histogram = LatencyHistogram(config.first_response_buckets or FIRST_RESPONSE_BUCKETS_MS)
    return ModelStatistics(config.name, version, config.metric_tags, window, histogram)


class _FirstResponse:
    """Wraps the callbacks of a request to measure the time to its first response.

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
