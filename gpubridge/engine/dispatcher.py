"""Brings a model's requests to its instances, in the batches that its scheduler makes, and counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

from gpubridge.config import ModelConfig
from gpubridge.dataplane import ModelCounters, RequestDispatch
from gpubridge.engine.alarm import Alarm
from gpubridge.engine.instance import Instance, InstanceState
from gpubridge.engine.scheduling.batches import late_error, queue_full
from gpubridge.engine.scheduling.policy import Refusal, Scheduler, stopping_error
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_strategies import request_scheduler, sequence_scheduler
from gpubridge.engine.sequence_dispatch import SequenceDispatch
from gpubridge.engine.spare_stub import SpareStub
from gpubridge.engine.tracing import Origin, RequestTracing
from gpubridge.errors import BridgeError, ErrorCode, unavailable
from gpubridge.host_shm import HostArena
from gpubridge.request import CompletedBatch, InferRequest, Outcome
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.telemetry.traces import Traces

_OnDone = Callable[[Outcome], None]
_FULL_STUB_SECONDS = 0.01
_MOST_WARNINGS = 256

Submission = Callable[..., None]
"""Takes a request over, and where it comes from, should it be traced: an `Origin`."""


class Dispatcher:
    """A model's requests from the moment they are submitted to that of their outcome: the policies.

    Holds no request itself: those that wait are the scheduler's, the others at an instance. The loop
    that brings the ones to the others is that of `RequestDispatch`, or `SequenceDispatch`.

    ``clock``: returns CLOCK_MONOTONIC nanoseconds, where another clock is to be used.

    Raises BridgeError: INVALID_ARG when the scheduler's settings contradict each other.
    """

    def __init__(
        self,
        config: ModelConfig,
        arena: HostArena,
        statistics: ModelStatistics,
        tracing: RequestTracing,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._name = config.name
        self._arena = arena
        self._statistics = statistics
        self._tracing = tracing
        self._clock = clock or time.monotonic_ns
        sequences = sequence_scheduler(config)
        self._of_sequences = sequences is not None
        # It holds the requests themselves, or the items of a sequence batcher.
        self._scheduler: Scheduler
        self._queue: RequestDispatch | SequenceDispatch
        # Requests that are no batch with others may wait at the stub as well as here; batches form
        # as late as possible.
        ahead = config.message.WhichOneof("scheduling_choice") is None
        if sequences is None:
            batches = self._scheduler = request_scheduler(config)
            shapes = None if batches.shapes is None else batches.shapes.of
            self._queue = RequestDispatch(
                self, batches.batcher, ahead, batches.wants_answers, statistics, shapes, clock
            )
        else:
            self._scheduler = sequences
            self._queue = SequenceDispatch(self, config, sequences, statistics, self._clock)
        self.enqueue: Callable[[InferRequest], None] = self._queue.enqueue
        self.dispatch = self._queue.dispatch
        self._timer = None if ahead else Alarm(self._queue.ring)
        self._held: dict[Any, tuple[_OnDone | None, Outcome]] = {}
        self._on_idle: Callable[[], None] | None = None
        self._warned: set[str] = set()
        self._instances: Sequence[Instance] = ()
        self._retry: asyncio.TimerHandle | None = None
        self._spare: SpareStub | None = None

    # -- what the model asks -------------------------------------------------------------------

    def is_first(self, name: str) -> bool:
        """Tell whether no process of the model has warned of an output of that name before."""
        known = name in self._warned
        if len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
        return not known

    @property
    def counters(self) -> ModelCounters:
        """Counts the model's requests: where they are answered, that is at stub connections."""
        return self._statistics

    @property
    def pending(self) -> int:
        """Requests that are queued or at a stub."""
        return self._queue.pending

    @property
    def queued(self) -> int:
        """Requests that are at no stub yet."""
        return self._scheduler.pending

    def serve(self, instances: Sequence[Instance]) -> None:
        """Give requests to these instances, in the order of their indices."""
        self._instances = instances
        if self._timer is None and len(instances) > 1:
            # Requests that wait at one instance may be given to another.
            self._timer = Alarm(self._queue.ring)
        self._queue.serve([instance.feed for instance in instances])

    def submission(
        self,
        prepare: Callable[[InferRequest, Origin | None], bool],
        traces: Traces,
        always: bool,
    ) -> Submission:
        """Return what takes requests over: each slot is freed here, each outcome comes by ``on_done``.

        - ``prepare``: called before a request is queued, if it may be traced or its inputs do not
          lie in a slot; returns whether it is queued now.
        - ``always``: have it called for every request.
        """
        if isinstance(self._queue, RequestDispatch):
            self._queue.prepare_with(prepare, traces, always)
            return self._queue.submit

        def submit(request: InferRequest, origin: Origin | None = None) -> None:
            if prepare(request, origin):
                self.enqueue(request)

        return submit

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Take nothing new; ``on_idle`` is called, once or more, when nothing is pending."""
        self._on_idle = on_idle
        self._scheduler.stop()
        self._queue.stop()
        if not self.pending:
            on_idle()

    def refuse_queued(self, text: str) -> None:
        """Refuse everything that is at no stub yet."""
        for item in self._scheduler.clear():
            self.refuse(_request(item), unavailable(text))
        self._release(self._scheduler.releasable())

    def close(self) -> None:
        """Let go of the instances, whom another may serve from now on, and of the timer; idempotent."""
        self._queue.serve(())
        if self._timer is not None:
            self._timer.close()

    # -- what the queue asks -------------------------------------------------------------------

    def set_timer(self, due_ns: int) -> None:
        """Have the queue told when it is so late."""
        if self._timer is not None:
            self._timer.set(due_ns)

    def stub_full(self, index: int) -> None:
        """Try again soon: the model lets go of what an instance's stub keeps without a word."""
        self._instances[index].say_full()
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_FULL_STUB_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.dispatch()

    def on_idle(self) -> None:
        """Tell the owner that nothing is pending and nothing new comes."""
        if self._on_idle is not None:
            self._on_idle()

    def check_hope(self) -> None:
        """Refuse what waits when no instance is going to take it."""
        if self._scheduler.pending and not self._may_come_up():
            self.refuse_queued(self._why_not())

    def _may_come_up(self) -> bool:
        return any(
            instance.state in (InstanceState.READY, InstanceState.RESTARTING)
            for instance in self._instances
        )

    def _why_not(self) -> str:
        reason = next((i.last_error for i in self._instances if i.last_error), "it is not ready")
        return f"Request for model '{self._name}' cannot be served: {reason}"

    # -- outcomes that are not a model's -------------------------------------------------------

    def refuse_new(self, request: InferRequest, stopped: bool) -> None:
        """Refuse a request that the queue does not take: it takes none any more, or is full."""
        self.refuse(request, stopping_error() if stopped else queue_full(request))

    def fail_new(self, request: InferRequest, error: BridgeError) -> None:
        """End a request that never came to the queue."""
        self._free(request)
        self._statistics.failed("OTHER", 0)
        request.finish(error)

    def fail_unsent(self, request: InferRequest, error: Exception) -> None:
        """End a request that could not be written for an instance's stub."""
        self._free(request)
        if request.batch_size:
            self._statistics.failed("OTHER", self._clock() - request.arrived)
        request.finish(request_error(error))

    def refuse_late(self, requests: Sequence[InferRequest]) -> None:
        """Refuse requests that waited too long."""
        self.refuse_items([(request, late_error()) for request in requests])

    def refuse_items(self, refusals: Sequence[Refusal]) -> None:
        """Refuse what the scheduler has given away."""
        for item, error in refusals:
            self.refuse(_request(item), error)
        if refusals:
            self._release(self._scheduler.releasable())

    def refuse(self, request: InferRequest, error: BridgeError) -> None:
        """End a request that never ran."""
        self._free(request)
        reason = "CANCELED" if error.code == ErrorCode.CANCELLED else "REJECTED"
        self._statistics.failed(reason, self._clock() - request.arrived)
        if self._is_held_back(request.on_done):
            # It never ran, so it has no place in the order of outcomes.
            request.on_done = request.on_done.args[1]
        request.finish(error)
        self._part(self._item(request))

    def hold_back(self, request: InferRequest) -> None:
        """Keep the outcome of a request until it is its turn."""
        request.on_done = partial(self._hold, self._item(request), request.on_done)

    def _is_held_back(self, on_done: Any) -> TypeGuard[partial[None]]:
        """Return whether this is the callback that puts an outcome into the order of outcomes."""
        return isinstance(on_done, partial) and on_done.func == self._hold

    def _item(self, request: InferRequest) -> Any:
        """Return what the scheduler holds for a request."""
        return request.item if self._of_sequences else request

    def cancel(self, request: InferRequest) -> None:
        """Spare the model a request that nobody waits for, if that is still possible."""
        if request.trace is not None:
            request.trace.abandoned()
        item = self._item(request)
        if self._scheduler.cancel(item):
            self._free(request)
            self._statistics.failed("CANCELED", self._clock() - request.arrived)
            self._part(item)
            self._release(self._scheduler.releasable())
            self.dispatch()
            return
        if item in self._held:
            self._held[item] = None, self._held[item][1]
        elif self._scheduler.wants_answers:
            # The scheduler still wants to know when it is over.
            request.on_done = partial(self._hold, item, None)
        for instance in self._instances:
            # A sequence must not go on with a gap: what has not started is executed all the same.
            instance.cancel(request, running_only=self._of_sequences)

    def _hold(self, item: Any, on_done: _OnDone | None, outcome: Outcome) -> None:
        """Keep an outcome until it is its turn."""
        self._held[item] = on_done, outcome
        self._release(self._scheduler.answered(item, self._clock()))

    def _release(self, items: Iterable[Any]) -> None:
        for item in items:
            on_done, outcome = self._held.pop(item)
            if on_done is not None:
                on_done(outcome)
            self._part(item)

    def _part(self, item: Any) -> None:
        """Part an item that has ended from its request: a cycle would wait for the collector."""
        if self._of_sequences:
            item.request.item = None

    def _free(self, request: InferRequest) -> None:
        slot, request.slot = request.slot, None
        request.ranges = request.client = None
        if slot is not None:
            self._arena.free(slot)

    # -- what instances tell -------------------------------------------------------------------

    def plan_spare(self, spare: SpareStub, delay: float) -> None:
        """Have an instance's stub started ahead, unless the model has one already, or will."""
        if self._spare is None or not self._spare.exists:
            self._spare = spare
            spare.plan(delay)

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
        self.queue_again(unstarted)
        now = self._clock()
        self._scheduler.instance_died(instance.index, now)
        for request in lost:
            if request.batch_size:
                self._statistics.failed("BACKEND", now - request.arrived)
                request.finish(error)
        # What waited for its turn behind them waits no longer.
        self._release(self._scheduler.releasable())
        self.dispatch()

    def queue_again(self, requests: Sequence[InferRequest]) -> None:
        """Put requests that an instance has not begun before all others; cancelled ones end."""
        self._scheduler.put_back([self._item(request) for request in requests])
        for request in requests:
            request.instance = None
            if request.on_done is None:
                self.cancel(request)

    def on_batches(
        self, returning: Sequence[InferRequest], traced: Sequence[CompletedBatch], now: int
    ) -> None:
        """Batches were answered, or requests of earlier ones ended, at ``now``: there is room for others.

        Requests are to be executed again that are ``returning``; batches are ``traced`` if one of
        their requests is.
        """
        if traced:
            self._tracing.completed(traced)
        for request in returning:
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


def _request(item: Any) -> Any:
    return item.request if type(item) is SequenceItem else item
