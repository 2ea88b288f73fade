"""Dispatches a model's requests to its instances, in the batches that its scheduler forms."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

from gpubridge.config import ModelConfig
from gpubridge.dataplane import RequestDispatch, TraceSampling
from gpubridge.engine.models.sequence_dispatch import SequenceDispatch
from gpubridge.engine.models.tracing import UNTRACED, Origin, RequestTracing
from gpubridge.engine.scheduling.scheduler import (
    Refusal,
    Scheduler,
    late_error,
    queue_full,
    stopping_error,
)
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_strategies import request_scheduler, sequence_scheduler
from gpubridge.engine.supervisor.instance import Instance, InstanceState
from gpubridge.engine.supervisor.replacement import ReplacementStub
from gpubridge.errors import BridgeError, ErrorCode, unavailable
from gpubridge.host_shm import HostArena
from gpubridge.request import CompletedBatch, InferRequest, Outcome
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.statistics import ModelStatistics

_OnDone = Callable[[Outcome], None]
_FULL_STUB_NS = 10_000_000
_MOST_WARNINGS = 256

Submission = Callable[..., None]
"""Submits a request; the second argument is its `Origin`, for tracing."""


class Dispatcher:
    """Policies for a model's requests between submission and outcome.

    Queued requests belong to the scheduler, the others to an instance. The loop that sends queued
    requests to instances is `RequestDispatch`, or `SequenceDispatch` for a model with sequences.

    ``clock``: returns CLOCK_MONOTONIC nanoseconds; tests pass their own.

    Its attributes:

    - ``counters``: the model's counters, which the stub connections update.
    - ``early_outcomes``: outcomes that wait for their turn, by item, where order is kept.

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
        self.counters = statistics
        self._tracing = tracing
        self._clock = clock or time.monotonic_ns
        sequences = sequence_scheduler(config)
        self._of_sequences = sequences is not None
        # Its items are requests, or those of a sequence batcher.
        self._scheduler: Scheduler
        self._queue: RequestDispatch | SequenceDispatch
        # Without batching, requests may as well wait at the stub; batches form as late as possible.
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
        self._timer = None if ahead else KernelTimer(self._queue.on_timer)
        self.early_outcomes: dict[Any, tuple[_OnDone | None, Outcome]] = {}
        self._on_idle: Callable[[], None] | None = None
        self._warned: set[str] = set()
        self._instances: Sequence[Instance] = ()
        self._replacement: ReplacementStub | None = None

    # -- called by the model -------------------------------------------------------------------

    def is_first_warning(self, name: str) -> bool:
        """Return whether no process of the model has warned of this output before."""
        known = name in self._warned
        if len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
        return not known

    @property
    def pending(self) -> int:
        """Return the number of requests that are queued or at a stub."""
        return self._queue.pending

    def enqueue(self, request: InferRequest) -> None:
        """Queue a request that is prepared."""
        self._queue.enqueue(request)

    def dispatch(self) -> None:
        """Send queued requests to instances that have a free place."""
        self._queue.dispatch()

    @property
    def queued(self) -> int:
        """Return the number of requests that are at no stub yet."""
        return self._scheduler.pending

    def serve(self, instances: Sequence[Instance]) -> None:
        """Send requests to these instances, in the order of their indices."""
        self._instances = instances
        if self._timer is None and len(instances) > 1:
            # Requests that wait at one instance may move to another.
            self._timer = KernelTimer(self._queue.on_timer)
        self._queue.serve([instance.feed for instance in instances])

    def submission(
        self,
        prepare: Callable[[InferRequest, Origin | None], bool],
        sampling: TraceSampling,
        always: bool,
    ) -> Submission:
        """Return the function that submits requests; it frees each slot and calls each ``on_done``.

        - ``prepare``: called before a request is queued, if it may be traced or its inputs are a
          client's or on a GPU; returns False if it queues the request itself, later.
        - ``always``: call ``prepare`` for every request.
        """
        if isinstance(self._queue, RequestDispatch):
            self._queue.prepare_with(prepare, sampling, UNTRACED, always)
            return self._queue.submit

        def submit(request: InferRequest, origin: Origin | None = None) -> None:
            if prepare(request, origin):
                self.enqueue(request)

        return submit

    def stop(self, on_idle: Callable[[], None]) -> None:
        """Refuse new requests; call ``on_idle``, once or more, when nothing is pending."""
        self._on_idle = on_idle
        self._scheduler.stop()
        self._queue.stop()
        if not self.pending:
            on_idle()

    def refuse_queued(self, text: str) -> None:
        """Refuse all requests that are at no stub yet."""
        for item in self._scheduler.clear():
            self.refuse(_request(item), unavailable(text))
        self._release(self._scheduler.releasable())

    def close(self) -> None:
        """Release the instances, which another dispatcher may serve, and the timer; idempotent."""
        self._queue.serve(())
        if self._timer is not None:
            self._timer.close()

    # -- called by the queue -------------------------------------------------------------------

    def set_timer(self, due_ns: int) -> None:
        """Call the queue's ``on_timer`` at ``due_ns``."""
        if self._timer is not None:
            self._timer.set(due_ns)

    def stub_full(self, index: int) -> None:
        """Refuse what waits if no instance can take a request: what frees one may wait as well.

        Otherwise retry soon: a stub sends no message when it releases memory that its model kept.
        """
        text = self._instances[index].describe_full()
        ready = [each.feed for each in self._instances if each.state is InstanceState.READY]
        if not any(feed.free_tickets for feed in ready):
            self.refuse_queued(text)
        else:
            self.set_timer(self._clock() + _FULL_STUB_NS)

    def refuse_full(self, index: int, items: Sequence[SequenceItem]) -> None:
        """Refuse requests of sequences at an instance whose stub cannot take them."""
        text = self._instances[index].describe_full()
        self.refuse_items([(item, unavailable(text)) for item in items])

    def on_idle(self) -> None:
        """Report that nothing is pending after `stop`."""
        if self._on_idle is not None:
            self._on_idle()

    def refuse_unservable(self) -> None:
        """Refuse queued requests if no instance is ready or restarting."""
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

    # -- refusals, failures and cancellation -------------------------------------------------------

    def refuse_new(self, request: InferRequest, stopped: bool) -> None:
        """Refuse a request because the queue is stopped or full."""
        self.refuse(request, stopping_error() if stopped else queue_full(request))

    def fail_new(self, request: InferRequest, error: BridgeError) -> None:
        """Fail a request that was never queued."""
        self._free(request)
        self._fail(request, error, "OTHER", 0)

    def fail_unsent(self, request: InferRequest, error: Exception) -> None:
        """Fail a request that could not be encoded for a stub."""
        self._free(request)
        failed = request_error(error)
        if request.batch_size:
            self._fail(request, failed, "OTHER", self._clock() - request.arrived)
        else:
            request.finish(failed)

    def refuse_late(self, requests: Sequence[InferRequest]) -> None:
        """Refuse requests that exceeded their queue time-out."""
        self.refuse_items([(request, late_error()) for request in requests])

    def refuse_items(self, refusals: Sequence[Refusal]) -> None:
        """Refuse items that the scheduler gave up."""
        for item, error in refusals:
            self.refuse(_request(item), error)
        if refusals:
            self._release(self._scheduler.releasable())

    def refuse(self, request: InferRequest, error: BridgeError) -> None:
        """Refuse a request that never ran."""
        self._free(request)
        reason = "CANCELED" if error.code == ErrorCode.CANCELLED else "REJECTED"
        if self._is_ordered(request.on_done):
            # It never ran, so no outcome waits for it.
            request.on_done = request.on_done.args[1]
        self._fail(request, error, reason, self._clock() - request.arrived)
        self._unlink_item(self._item(request))

    def _fail(self, request: InferRequest, error: BridgeError, reason: str, spent_ns: int) -> None:
        """Count a failed request, and pass its error on."""
        self.counters.failed(reason, spent_ns)
        if reason != "CANCELED":
            self.counters.note_error(error, request.identifier)
        request.finish(error)

    def order_outcome(self, request: InferRequest) -> None:
        """Deliver the outcome of a request in the order of the requests."""
        request.on_done = partial(self._keep_outcome, self._item(request), request.on_done)

    def _is_ordered(self, on_done: Any) -> TypeGuard[partial[None]]:
        """Return whether `order_outcome` has wrapped this callback."""
        return isinstance(on_done, partial) and on_done.func == self._keep_outcome

    def _item(self, request: InferRequest) -> Any:
        """Return the scheduler's item for a request."""
        return request.item if self._of_sequences else request

    def cancel(self, request: InferRequest) -> None:
        """Cancel a request; a stub that has started it is told."""
        if request.trace is not None:
            request.trace.abandoned()
        item = self._item(request)
        if self._scheduler.cancel(item):
            self._free(request)
            self.counters.failed("CANCELED", self._clock() - request.arrived)
            self._unlink_item(item)
            self._release(self._scheduler.releasable())
            self.dispatch()
            return
        if item in self.early_outcomes:
            self.early_outcomes[item] = None, self.early_outcomes[item][1]
        elif self._scheduler.wants_answers:
            # The scheduler still needs its completion.
            request.on_done = partial(self._keep_outcome, item, None)
        for instance in self._instances:
            # A sequence must not continue with a gap: requests not started are executed anyway.
            instance.cancel(request, running_only=self._of_sequences)

    def _keep_outcome(self, item: Any, on_done: _OnDone | None, outcome: Outcome) -> None:
        """Store an outcome until its turn."""
        self.early_outcomes[item] = on_done, outcome
        self._release(self._scheduler.answered(item, self._clock()))

    def _release(self, items: Iterable[Any]) -> None:
        for item in items:
            on_done, outcome = self.early_outcomes.pop(item)
            if on_done is not None:
                on_done(outcome)
            self._unlink_item(item)

    def _unlink_item(self, item: Any) -> None:
        """Break the reference cycle between a completed item and its request."""
        if self._of_sequences:
            item.request.item = None

    def _free(self, request: InferRequest) -> None:
        slot, request.slot = request.slot, None
        request.ranges = request.client = None
        if slot is not None:
            self._arena.free(slot)

    # -- called by instances -------------------------------------------------------------------

    def plan_replacement(self, replacement: ReplacementStub, delay: float) -> None:
        """Start a replacement stub, unless the model already has one or will."""
        if self._replacement is None or not self._replacement.exists:
            self._replacement = replacement
            replacement.plan(delay)

    def on_ready(self, instance: Instance) -> None:
        """Handle an instance that has become ready, for the first time or again."""
        self._scheduler.instance_up(instance.index)
        self.dispatch()

    def on_death(
        self,
        instance: Instance,
        lost: Sequence[InferRequest],
        unstarted: Sequence[InferRequest],
        error: BridgeError,
    ) -> None:
        """Handle the death of an instance's stub: fail started requests, queue the others again."""
        self.queue_again(unstarted)
        now = self._clock()
        self._scheduler.instance_died(instance.index, now)
        for request in lost:
            if request.batch_size:
                self._fail(request, error, "BACKEND", now - request.arrived)
        # Outcomes behind them may be delivered now.
        self._release(self._scheduler.releasable())
        self.dispatch()

    def queue_again(self, requests: Sequence[InferRequest]) -> None:
        """Queue requests that an instance has not started before all others; end cancelled ones."""
        self._scheduler.put_back([self._item(request) for request in requests])
        for request in requests:
            request.instance = None
            if request.on_done is None:
                self.cancel(request)

    def on_batches(
        self, returning: Sequence[InferRequest], traced: Sequence[CompletedBatch], now: int
    ) -> None:
        """Handle completed batches, or completed requests of earlier ones, and send further batches.

        - ``returning``: requests that their model rescheduled.
        - ``traced``: batches with a traced request.
        - ``now``: CLOCK_MONOTONIC nanoseconds of the completion.
        """
        if traced:
            self._tracing.completed(traced)
        for request in returning:
            self._run_again(request, now)
        self._queue.dispatch(now)

    def _run_again(self, request: InferRequest, now: int) -> None:
        """Execute a request again, as its model asked."""
        on_done = request.on_done
        scheduler = self._scheduler
        try:
            if self._is_ordered(on_done) and on_done.args[1] is None:
                raise BridgeError("the request was cancelled", ErrorCode.CANCELLED)
            if not isinstance(scheduler, SequenceScheduler):
                raise BridgeError("only requests of sequences are rescheduled", ErrorCode.INTERNAL)
            scheduler.reschedule(request.item, now)
            request.arrived = now
        except BridgeError as error:
            self._free(request)
            reason = "CANCELED" if error.code == ErrorCode.CANCELLED else "BACKEND"
            self._fail(request, error, reason, now - request.arrived)


def _request(item: Any) -> Any:
    return item.request if type(item) is SequenceItem else item


_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_NS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class KernelTimer:
    """One-shot timer in CLOCK_MONOTONIC nanoseconds; owns a timerfd.

    The event loop's own timers have a resolution of milliseconds.

    Raises OSError when no descriptor is left.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._on_due = on_due
        self._due = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_readable)

    def set(self, due_ns: int) -> None:
        """Expire at ``due_ns``, at once if that is past; keep an earlier time that was set."""
        if self._due and self._due <= due_ns:
            return
        self._due = due_ns
        # A time of zero would stop the timer.
        seconds, nanoseconds = divmod(max(due_ns, 1), _NS)
        value = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def close(self) -> None:
        """Stop the timer; idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._due = 0
        self._on_due()
