"""Dispatch loop of a model with sequences; counterpart of the compiled `RequestDispatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gpubridge.config import ModelConfig
from gpubridge.dataplane import InstanceFeed, ModelCounters
from gpubridge.engine.scheduling.scheduler import Refusal
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_requests import SequenceRequests
from gpubridge.engine.scheduling.settings import ShapeIds, shape_agreement
from gpubridge.errors import BridgeError
from gpubridge.request import InferRequest


class SequenceOwner(Protocol):
    """The model of a dispatch loop: it owns the requests' outcomes, and the timer."""

    def cancel(self, request: InferRequest) -> None:
        """Cancel a request; a stub that has started it is told."""

    def refuse(self, request: InferRequest, error: BridgeError) -> None:
        """Refuse a request that never ran."""

    def refuse_items(self, refusals: Sequence[Refusal]) -> None:
        """Refuse items that the scheduler gave up."""

    def refuse_full(self, index: int, items: Sequence[SequenceItem]) -> None:
        """Refuse requests of sequences at an instance whose stub cannot take them."""

    def refuse_unservable(self) -> None:
        """Refuse queued requests if no instance is ready or restarting."""

    def fail_unsent(self, request: InferRequest, error: Exception) -> None:
        """Fail a request that could not be encoded for a stub."""

    def order_outcome(self, request: InferRequest) -> None:
        """Deliver the outcome of a request in the order of the requests."""

    def set_timer(self, due_ns: int) -> None:
        """Call ``on_timer`` at ``due_ns``."""

    def on_idle(self) -> None:
        """Report that nothing is pending after `SequenceDispatch.stop`."""


class SequenceDispatch:
    """Queues requests in a sequence batcher and sends its batches to their instances."""

    def __init__(
        self,
        owner: SequenceOwner,
        config: ModelConfig,
        scheduler: SequenceScheduler,
        counters: ModelCounters,
        clock: Callable[[], int],
    ) -> None:
        self._owner = owner
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._requests = SequenceRequests(config)
        self._shapes = ShapeIds(shape_agreement(config))
        self._feeds: Sequence[InstanceFeed] = ()
        self._stopping = False

    @property
    def pending(self) -> int:
        """Return the number of requests that are queued or at a stub."""
        at_stubs = sum(feed.in_flight + feed.open_requests for feed in self._feeds)
        return self._scheduler.pending + at_stubs

    def serve(self, feeds: Sequence[InstanceFeed]) -> None:
        """Set the feeds of the instances, in the order of their indices."""
        self._feeds = feeds

    def stop(self) -> None:
        """From now on, call the owner's ``on_idle`` whenever nothing is pending."""
        self._stopping = True

    def enqueue(self, request: InferRequest) -> None:
        """Queue a request."""
        owner = self._owner
        now = request.arrived = self._clock()
        request.cancelled = owner.cancel
        if request.copied:
            self._counters.copied(request.copied)
        try:
            self._scheduler.add(self._item(request), now)
        except BridgeError as error:
            owner.refuse(request, error)
            return
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            owner.fail_unsent(request, error)
            return
        if self._scheduler.wants_answers:
            owner.order_outcome(request)
        self.dispatch(now)

    def _item(self, request: InferRequest) -> SequenceItem:
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

    def dispatch(self, now: int = 0) -> None:
        """Send the batches that are due to idle instances."""
        now = now or self._clock()
        owner, scheduler = self._owner, self._scheduler
        owner.refuse_items(scheduler.refused(now))
        free = [at for at, feed in enumerate(self._feeds) if feed.window and not feed.in_flight]
        if not free:
            owner.refuse_unservable()
        for index in free:
            feed = self._feeds[index]
            # If no request of a batch can be built, the instance stays idle.
            while feed.window and not feed.in_flight:
                tickets = feed.free_tickets
                while given_up := scheduler.give_up(index, tickets):
                    owner.refuse_full(index, given_up)
                items = scheduler.take(index, now, tickets)
                if not items:
                    break
                requests = self._build(items)
                if requests:
                    feed.submit(requests)
        due = scheduler.next_wakeup(now)
        if due is not None:
            owner.set_timer(due)
        if self._stopping and not self.pending:
            owner.on_idle()

    def _build(self, items: Sequence[SequenceItem]) -> list[InferRequest]:
        """Build the requests of a batch; fail those that cannot be built."""
        requests = []
        for item in items:
            try:
                requests.append(self._requests.of(item))
            except Exception as error:  # noqa: BLE001
                if item.pattern is None:
                    self._owner.fail_unsent(item.request, error)
        return requests

    def on_timer(self) -> None:
        """Dispatch the batches that became due."""
        self.dispatch()
