"""Brings a model's requests to its instances, in the batches that its scheduler makes, and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

from gpubridge.config import ModelConfig
from gpubridge.dataplane import ModelCounters
from gpubridge.engine.alarm import Alarm
from gpubridge.engine.instance import Instance
from gpubridge.engine.instance_state import InstanceState
from gpubridge.engine.scheduling import (
    Scheduler,
    SequenceItem,
    SequenceScheduler,
    ShapeIds,
    request_scheduler,
    sequence_scheduler,
    shape_agreement,
)
from gpubridge.engine.sequence_requests import SequenceRequests
from gpubridge.engine.tracing import RequestTracing
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import HostArena
from gpubridge.request import Completed, InferRequest, Outcome
from gpubridge.telemetry.statistics import ModelStatistics

__all__ = ["Dispatcher"]

_clock = time.monotonic_ns
_OnDone = Callable[[Outcome], None]


class Dispatcher:
    """A model's requests from the moment they are submitted to that of their outcome.

    Holds no request itself: those that wait are the scheduler's, the others at an instance.

    Parameters
    ----------
    config : ModelConfig
        Says which scheduler.
    arena : HostArena
        Where requests lie.
    statistics : ModelStatistics
        Counted here.
    tracing : RequestTracing
        Follows the requests that are traced.

    Raises
    ------
    BridgeError
        INVALID_ARG when the scheduler's settings contradict each other.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: HostArena,
        statistics: ModelStatistics,
        tracing: RequestTracing,
    ) -> None:
        self._name = config.name
        self._arena = arena
        self._statistics = statistics
        self._tracing = tracing
        sequences = sequence_scheduler(config)
        self._sequences = SequenceRequests(config) if sequences is not None else None
        self._shapes = ShapeIds(shape_agreement(config))
        # It holds the requests themselves, or the items of a sequence batcher.
        self._scheduler: Scheduler = sequences or request_scheduler(config)
        # Requests that are no batch with others may wait at the stub as well as here; batches form
        # as late as possible.
        choice = config.message.WhichOneof("scheduling_choice")
        self._ahead = choice is None
        self._alarm = None if self._ahead else Alarm(self.dispatch)
        self._ordered = self._scheduler.wants_answers
        self._held: dict[Any, tuple[_OnDone | None, Outcome]] = {}
        self._stopping = False
        self._on_idle: Callable[[], None] | None = None
        self.instances: Sequence[Instance] = ()
        #: Those of them that get batches before they are free.
        self.fed_ahead: Sequence[Instance] = ()

    # -- what the model asks -------------------------------------------------------------------

    @property
    def counters(self) -> ModelCounters:
        """Counts the model's requests: where they are answered, that is at stub connections."""
        return self._statistics

    @property
    def pending(self) -> int:
        """Requests that are queued or at a stub."""
        at_stubs = sum(i.in_flight + i.open_requests for i in self.instances)
        return self._scheduler.pending + at_stubs

    @property
    def queued(self) -> int:
        """Requests that are at no stub yet."""
        return self._scheduler.pending

    def submit(self, request: InferRequest) -> None:
        """Take a request over: its slot is freed here, its outcome comes by ``on_done``."""
        now = request.arrived = _clock()
        request.cancelled = self._cancel
        if request.copied:
            self._statistics.copied(request.copied)
        try:
            item = request if self._sequences is None else self._sequence_item(request)
            self._scheduler.add(item, now)
            if self._ordered:
                request.on_done = partial(self._hold, item, request.on_done)
        except BridgeError as error:
            self._refuse(request, error)
            return
        self.dispatch(now)

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Take nothing new; ``on_idle`` is called, once or more, when nothing is pending."""
        self._stopping = True
        self._on_idle = on_idle
        self._scheduler.stop()
        if not self.pending:
            on_idle()

    def refuse_queued(self, text: str) -> None:
        """Refuse everything that is at no stub yet."""
        for item in self._scheduler.clear():
            self._refuse(_request(item), BridgeError(text, ErrorCode.UNAVAILABLE))
        self._release(self._scheduler.releasable())

    def close(self) -> None:
        """Give the timer back; idempotent."""
        if self._alarm is not None:
            self._alarm.close()

    # -- from the scheduler to the instances ---------------------------------------------------

    def dispatch(self, now: int = 0) -> None:
        """Send what is due to the instances that have room, the least loaded first."""
        if self._ahead:
            self._feed_ahead()
        else:
            now = now or _clock()
            self._settle_refused(now)
            self._feed(now)
            due = self._scheduler.next_wakeup(now)
            if due is not None and self._alarm is not None:
                self._alarm.set(due)
        if self._stopping and self._on_idle is not None and not self.pending:
            self._on_idle()

    def _feed_ahead(self) -> None:
        """Hand out requests that are batches by themselves; some may wait at the stub."""
        take = self._scheduler.take
        while True:
            best: Instance | None = None
            for instance in self.instances:
                load = instance.in_flight
                if load < instance.window and (best is None or load < best.in_flight):
                    best = instance
            if best is None:
                self._check_hope()
                return
            requests = take(best.index, 0)
            if requests is None:
                return
            best.submit(requests)

    def _feed(self, now: int) -> None:
        """Hand out batches, each as late as possible: to instances that have nothing to do.

        Those that copy the inputs of a batch while they execute another get it before, if it is full.
        """
        free = [i for i in self.instances if i.window and not i.in_flight]
        if not free:
            self._check_hope()
        for instance in free:
            items = self._scheduler.take(instance.index, now)
            if items:
                made = self._sequences
                instance.submit(items if made is None else [made.of(item) for item in items])
        for instance in self.fed_ahead:
            while instance.window and 0 < instance.batches_at_stub < instance.least_window:
                items = self._scheduler.take_ahead(instance.index, now)
                if not items:
                    break
                instance.submit(items)

    def _check_hope(self) -> None:
        """Refuse what waits when no instance is going to take it."""
        if self._scheduler.pending and not self._may_come_up():
            self.refuse_queued(self._why_not())

    def _sequence_item(self, request: InferRequest) -> SequenceItem:
        options = request.options
        item = request.item = SequenceItem(
            request,
            options.correlation_id,
            options.start,
            options.end,
            self._shapes.of(options),
            options.timeout_us,
            request.batch_size,
        )
        return item

    def _may_come_up(self) -> bool:
        return any(
            instance.state in (InstanceState.READY, InstanceState.RESTARTING)
            for instance in self.instances
        )

    def _why_not(self) -> str:
        reason = next((i.last_error for i in self.instances if i.last_error), "it is not ready")
        return f"Request for model '{self._name}' cannot be served: {reason}"

    # -- outcomes that are not a model's -------------------------------------------------------

    def _settle_refused(self, now: int) -> None:
        refusals = self._scheduler.refused(now)
        for item, error in refusals:
            self._refuse(_request(item), error)
        if refusals:
            self._release(self._scheduler.releasable())

    def _refuse(self, request: InferRequest, error: BridgeError) -> None:
        self._free(request)
        reason = "CANCELED" if error.code == ErrorCode.CANCELLED else "REJECTED"
        self._statistics.failed(reason, _clock() - request.arrived)
        if self._is_held_back(request.on_done):
            # It never ran, so it has no place in the order of outcomes.
            request.on_done = request.on_done.args[1]
        request.finish(error)

    def _is_held_back(self, on_done: Any) -> TypeGuard[partial[None]]:
        """Whether this is how an outcome gets into the order of outcomes."""
        return isinstance(on_done, partial) and on_done.func == self._hold

    def _cancel(self, request: InferRequest) -> None:
        """Spare the model a request that nobody waits for, if that is still possible."""
        if request.trace is not None:
            request.trace.abandoned()
        item: Any = request if self._sequences is None else request.item
        if self._scheduler.cancel(item):
            self._free(request)
            self._statistics.failed("CANCELED", _clock() - request.arrived)
            self._release(self._scheduler.releasable())
            self.dispatch()
            return
        if self._ordered:
            # The scheduler still wants to know when it is over.
            request.on_done = partial(self._hold, item, None)
            request.on_partial = None
            if item in self._held:
                self._held[item] = None, self._held[item][1]
        for instance in self.instances:
            # A sequence must not go on with a gap: what has not started is executed all the same.
            instance.cancel(request, running_only=self._sequences is not None)

    def _hold(self, item: Any, on_done: _OnDone | None, outcome: Outcome) -> None:
        """Keep an outcome until it is its turn."""
        self._held[item] = on_done, outcome
        self._release(self._scheduler.answered(item, _clock()))

    def _release(self, items: Iterable[Any]) -> None:
        for item in items:
            on_done, outcome = self._held.pop(item)
            if on_done is not None:
                on_done(outcome)

    def _free(self, request: InferRequest) -> None:
        slot, request.slot = request.slot, None
        request.ranges = request.client = None
        if slot is not None:
            self._arena.free(slot)

    # -- what instances tell -------------------------------------------------------------------

    def on_room(self) -> None:
        """An instance may take more, or none can any longer."""
        self.dispatch()

    def on_up(self, instance: Instance) -> None:
        """An instance is ready, for the first time or again."""
        self._scheduler.instance_up(instance.index)
        self.dispatch()

    def on_death(
        self,
        instance: Instance,
        lost: Sequence[InferRequest],
        unstarted: Sequence[InferRequest],
        error: BridgeError,
    ) -> None:
        """An instance's process died: the requests it had started fail, the others wait again."""
        items: list[Any] = [r if self._sequences is None else r.item for r in unstarted]
        self._scheduler.put_back(items)
        for request in unstarted:
            request.instance = None
            if request.on_done is None:
                self._cancel(request)
        now = _clock()
        self._scheduler.instance_died(instance.index, now)
        for request in lost:
            if request.batch_size:
                self._statistics.failed("BACKEND", now - request.arrived)
                request.finish(error)
        # What waited for its turn behind them waits no longer.
        self._release(self._scheduler.releasable())
        self.dispatch()

    def on_batches(self, completed: Completed, now: int) -> None:
        """Batches were answered, at ``now``, so that there is room for others."""
        if completed.traced:
            self._tracing.completed(completed.traced)
        for request in completed.returning:
            self._run_again(request, now)
        self.dispatch(now)

    def _run_again(self, request: InferRequest, now: int) -> None:
        """Have a request executed again, as its model wishes."""
        on_done = request.on_done
        scheduler = self._scheduler
        try:
            if self._is_held_back(on_done) and on_done.args[1] is None:
                raise BridgeError("the request was cancelled", ErrorCode.CANCELLED)
            if not isinstance(scheduler, SequenceScheduler):
                raise BridgeError("only requests of sequences are rescheduled", ErrorCode.INTERNAL)
            scheduler.reschedule(request.item, now)
            request.arrived = now
        except BridgeError as error:
            self._free(request)
            reason = "CANCELED" if error.code == ErrorCode.CANCELLED else "BACKEND"
            self._statistics.failed(reason, now - request.arrived)
            request.finish(error)

    def on_responses(self, _closed: list[InferRequest], now: int) -> None:
        """Requests ended some time after their batch, at ``now``."""
        self.dispatch(now)


def _request(item: Any) -> Any:
    return item.request if type(item) is SequenceItem else item
