"""Strategies of sequence batching, and the choice of a model's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from gpubridge.config import ModelConfig
from gpubridge.dataplane import DynamicBatcher
from gpubridge.engine.scheduling.scheduler import BatchScheduler, dynamic_batcher
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import RequestSequence, SequenceItem
from gpubridge.engine.scheduling.sequence_settings import (
    DirectStrategy,
    OldestStrategy,
    SequenceBatching,
    parse_sequence_batching,
)
from gpubridge.engine.scheduling.settings import (
    DynamicBatching,
    parse_dynamic_batching,
    shape_agreement,
)
from gpubridge.transport.control import LARGEST_BATCH

_logger = logging.getLogger(__name__)


class DirectSequenceScheduler(SequenceScheduler):
    """Batches in which the n-th request belongs to the sequence in slot n.

    Slots below the last request without a request get padding. An instance has one batch at a time.
    Requests whose shapes differ from those of the oldest request wait for the next batch.
    """

    def __init__(
        self, settings: SequenceBatching, strategy: DirectStrategy, model: str, max_batch_size: int
    ) -> None:
        # A batch of more sequences would exceed the tickets of a stub.
        super().__init__(
            settings, model, max_batch_size, min(max(max_batch_size, 1), LARGEST_BATCH)
        )
        self._delay_ns = strategy.max_queue_delay_us * 1000
        self._utilization = strategy.minimum_slot_utilization
        self._at_work: dict[int, int] = {}

    def take(
        self, instance: int, now_ns: int, most: int = LARGEST_BATCH
    ) -> list[SequenceItem] | None:
        """Return the next batch of an instance, one item per slot from the first on.

        Padding has `request` None and a `pattern`.
        """
        self._expire(now_ns)
        due = self._due_at(instance)
        if due is None or due > now_ns:
            return None
        assigned = self._assigned[instance][:most]
        fronts = [s.queue[0] if s is not None and s.queue else None for s in assigned]
        # The oldest request decides about the shapes, so that no shape starves.
        pattern = min(filter(None, fronts), key=lambda item: item.arrived)
        turns = [item is not None and item.shape == pattern.shape for item in fronts]
        while not turns[-1]:
            turns.pop()
        batch: list[SequenceItem] = []
        for item, has_turn in zip(fronts, turns, strict=False):
            if item is not None and has_turn:
                self._take_first(item)
                batch.append(item)
                self._at_work[instance] = self._at_work.get(instance, 0) + 1
            else:
                batch.append(self._padding(pattern))
        return batch

    def _padding(self, pattern: SequenceItem) -> SequenceItem:
        item = SequenceItem(None, shape=pattern.shape)
        item.pattern = pattern
        item.controls = self._controls.of_padding()
        return item

    def _due_at(self, instance: int) -> int | None:
        """Return when an instance's next batch is due; None if it has no request."""
        if self._at_work.get(instance):
            return None
        ready = [
            sequence.queue[0].arrived
            for sequence in self._assigned.get(instance, ())
            if sequence is not None and sequence.queue
        ]
        if not ready:
            return None
        first = min(ready)
        if not self._delay_ns or len(ready) >= self._utilization * self._slots:
            return first
        return first + self._delay_ns

    def _batch_times(self, now_ns: int) -> Iterator[int]:
        for instance in self._assigned:
            due = self._due_at(instance)
            if due is not None and due > now_ns:
                yield due

    def _tickets_of(self, sequence: RequestSequence) -> int:
        # Slots before it without a request get padding.
        return sequence.slot + 1 if sequence.queue else 0

    def _completed(self, sequence: RequestSequence) -> None:
        super()._completed(sequence)
        self._at_work[sequence.instance] -= 1

    def _instance_removed(self, instance: int) -> None:
        self._at_work.pop(instance, None)


class OldestSequenceScheduler(SequenceScheduler):
    """Batches of the oldest requests, at most one of each sequence.

    The next request of a sequence is a candidate once the previous one is completed. Each instance
    batches its candidates with a dynamic batcher of its own.
    """

    def __init__(
        self, settings: SequenceBatching, strategy: OldestStrategy, model: str, max_batch_size: int
    ) -> None:
        slots = strategy.max_candidate_sequences or max(max_batch_size, 1)
        super().__init__(settings, model, max_batch_size, slots)
        self._max_batch_size = max_batch_size
        self._gathering = DynamicBatching(
            preferred_batch_sizes=strategy.preferred_batch_sizes,
            max_queue_delay_us=strategy.max_queue_delay_us,
            preserve_ordering=strategy.preserve_ordering,
        )
        self._batchers: dict[int, DynamicBatcher] = {}
        self._released: list[SequenceItem] = []

    def take(
        self, instance: int, now_ns: int, most: int = LARGEST_BATCH
    ) -> list[SequenceItem] | None:
        """Return the next batch of an instance, or its first ``most`` items; None if none is due."""
        self._expire(now_ns)
        batcher = self._batchers.get(instance)
        items: list[SequenceItem] | None = (
            batcher.take(instance, now_ns, most) if batcher is not None else None
        )
        for item in items or ():
            if item.sequence is not None:
                item.sequence.offered = None
            self._take_first(item)
        return items

    def releasable(self) -> list[SequenceItem]:
        """Return further items whose outcomes may be delivered since the last `answered`."""
        items, self._released = self._released, []
        for batcher in self._batchers.values():
            items += batcher.releasable()
        return items

    def _batch_times(self, now_ns: int) -> Iterator[int]:
        for batcher in self._batchers.values():
            due = batcher.next_wakeup(now_ns)
            if due is not None:
                yield due

    def _ordered(self, item: SequenceItem, _now_ns: int) -> list[SequenceItem]:
        batcher = self._batchers.get(item.instance)
        return batcher.answered(item) if batcher is not None else [item]

    def _offer(self, sequence: RequestSequence) -> None:
        if sequence.instance < 0 or sequence.in_flight or not sequence.queue:
            return
        if sequence.offered is None:
            item = sequence.offered = sequence.queue[0]
            batcher = self._batchers[sequence.instance]
            batcher.add(item, item.size, item.shape, 0, 0, item.arrived)

    def _restore(self, items: Sequence[SequenceItem]) -> None:
        by_instance: dict[int, list[SequenceItem]] = {}
        for item in items:
            sequence = item.sequence
            if sequence is not None:
                sequence.offered = item
                by_instance.setdefault(sequence.instance, []).append(item)
        for instance, group in by_instance.items():
            self._batchers[instance].put_back(
                [(item, item.size, item.shape, 0, item.arrived) for item in group]
            )

    def _withdraw(self, item: SequenceItem) -> None:
        sequence = item.sequence
        if sequence is not None and sequence.offered is item:
            sequence.offered = None
            self._batchers[sequence.instance].cancel(item)

    def _instance_added(self, instance: int) -> None:
        self._batchers[instance] = dynamic_batcher(self._gathering, self._max_batch_size)

    def _instance_removed(self, instance: int) -> None:
        self._released += self._batchers.pop(instance).abandon_order()


def request_scheduler(config: ModelConfig) -> BatchScheduler:
    """Return the scheduler of a model without ``sequence_batching``; raises BridgeError."""
    message = config.message
    if message.WhichOneof("scheduling_choice") != "dynamic_batching":
        return BatchScheduler(DynamicBatching(), 0, shape_agreement(config))
    settings = parse_dynamic_batching(config.name, message.dynamic_batching)
    return BatchScheduler(settings, config.max_batch_size, shape_agreement(config))


def sequence_scheduler(config: ModelConfig) -> SequenceScheduler | None:
    """Return the scheduler of a model with ``sequence_batching``; None for another model.

    Raises BridgeError: ``INVALID_ARG`` for invalid settings.
    """
    message = config.message
    if message.WhichOneof("scheduling_choice") != "sequence_batching":
        return None
    settings = parse_sequence_batching(config.name, message.sequence_batching)
    for notice in settings.notices:
        _logger.warning("model '%s': %s", config.name, notice)
    strategy = settings.strategy
    if isinstance(strategy, DirectStrategy):
        return DirectSequenceScheduler(settings, strategy, config.name, config.max_batch_size)
    return OldestSequenceScheduler(settings, strategy, config.name, config.max_batch_size)
