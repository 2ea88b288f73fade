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
        try:
            self._scheduler.add(self._item(request), now)
        except BridgeError as error:
            owner.refuse(request, error)
            return
        except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
            owner.fail_unsent(request, error)
            return
        if self._scheduler.wants_answers:
            owner.hold_back(request)
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
        """Send what is due to the instances that have nothing to do."""
        now = now or self._clock()
        owner, scheduler = self._owner, self._scheduler
        owner.refuse_items(scheduler.refused(now))
        free = [at for at, feed in enumerate(self._feeds) if feed.window and not feed.in_flight]
        if not free:
            owner.check_hope()
        for index in free:
            feed = self._feeds[index]
            # A batch of which nothing can be sent leaves it free.
            while feed.window and not feed.in_flight:
                items = scheduler.take(index, now, feed.free_tickets)
                if not items:
                    if items is not None:
                        owner.stub_full(index)
                    break
                requests = self._made(items)
                if requests:
                    feed.submit(requests)
        due = scheduler.next_wakeup(now)
        if due is not None:
            owner.set_timer(due)
        if self._stopping and not self.pending:
            owner.on_idle()

    def _made(self, items: Sequence[SequenceItem]) -> list[InferRequest]:
        """Return the requests of a batch; those that cannot be made fail."""
        requests = []
        for item in items:
            try:
                requests.append(self._requests.of(item))
            except Exception as error:  # noqa: BLE001
                if item.pattern is None:
                    self._owner.fail_unsent(item.request, error)
        return requests

    def ring(self) -> None:
        """Dispatch what the timer was set for."""
        self.dispatch()
