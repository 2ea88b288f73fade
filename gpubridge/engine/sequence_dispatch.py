"""The dispatch loop of a model with sequences: as the compiled `RequestDispatch`, with items of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpubridge.config import ModelConfig
from gpubridge.dataplane import InstanceFeed, ModelCounters
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.settings import ShapeIds, shape_agreement
from gpubridge.engine.sequence_requests import SequenceRequests
from gpubridge.errors import BridgeError
from gpubridge.request import InferRequest

if TYPE_CHECKING:
    from gpubridge.engine.dispatcher import Dispatcher


class SequenceDispatch:
    """Queues requests in a sequence batcher, and gives its batches to the instances they belong to."""

    def __init__(
        self,
        owner: Dispatcher,
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
        """Requests that are queued or at a stub."""
        at_stubs = sum(feed.in_flight + feed.open_requests for feed in self._feeds)
        return self._scheduler.pending + at_stubs

    def serve(self, feeds: Sequence[InstanceFeed]) -> None:
        """Feed these instances, in the order of their indices."""
        self._feeds = feeds

    def stop(self) -> None:
        """Call ``on_idle`` of the owner whenever nothing is pending, from now on."""
        self._stopping = True

    def enqueue(self, request: InferRequest) -> None:
        """Take a request over."""
        owner = self._owner
        now = request.arrived = self._clock()
        request.cancelled = owner.cancel
        if request.copied:
            self._counters.copied(request.copied)
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
        try:
            self._scheduler.add(item, now)
        except BridgeError as error:
            owner.refuse(request, error)
            return
        if self._scheduler.wants_answers:
            owner.hold_back(request)
        self.dispatch(now)

    def dispatch(self, now: int = 0) -> None:
        """Send what is due to the instances that have nothing to do."""
        now = now or self._clock()
        owner, scheduler = self._owner, self._scheduler
        owner.refuse_items(scheduler.refused(now))
        free = [at for at, feed in enumerate(self._feeds) if feed.window and not feed.in_flight]
        if not free:
            owner.check_hope()
        for index in free:
            items = scheduler.take(index, now, self._feeds[index].free_tickets)
            if items:
                self._feeds[index].submit([self._requests.of(item) for item in items])
            elif items is not None:
                owner.stub_full(index)
        due = scheduler.next_wakeup(now)
        if due is not None:
            owner.set_timer(due)
        if self._stopping and not self.pending:
            owner.on_idle()

    def ring(self) -> None:
        """Dispatch what the timer was set for."""
        self.dispatch()
