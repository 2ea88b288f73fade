"""The oldest strategy: whichever sequences of an instance are ready make its next batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Series

from gpubridge.dataplane import DynamicBatcher
from gpubridge.engine.scheduling.batches import dynamic_batcher
from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import Sequence, SequenceItem
from gpubridge.engine.scheduling.sequence_settings import OldestStrategy, SequenceBatching
from gpubridge.engine.scheduling.settings import DynamicBatching

__all__ = ["OldestSequenceScheduler"]


class OldestSequenceScheduler(SequenceScheduler):
    """Batches of the requests that came first, at most one of each sequence.

    The next request of a sequence is a candidate when the one before it has its answer. Each
    instance gathers its candidates with a dynamic batcher of its own.

    Parameters
    ----------
    settings : SequenceBatching
    strategy : OldestStrategy
    model : str
    max_batch_size : int
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

    def take(self, instance: int, now_ns: int) -> list[SequenceItem] | None:
        """Give away the next batch of an instance if it is due, with control tensors and slots."""
        self._age(now_ns)
        batcher = self._batchers.get(instance)
        items: list[SequenceItem] | None = (
            batcher.take(instance, now_ns) if batcher is not None else None
        )
        for item in items or ():
            if item.sequence is not None:
                item.sequence.offered = None
            self._hand_out(item)
        return items

    def releasable(self) -> list[SequenceItem]:
        """Return what else may go out since the last call of `answered`."""
        items, self._released = self._released, []
        for batcher in self._batchers.values():
            items += batcher.releasable()
        return items

    def _batch_times(self, now_ns: int) -> Iterator[int]:
        for batcher in self._batchers.values():
            due = batcher.next_wakeup(now_ns)
            if due is not None:
                yield due

    def _in_order(self, item: SequenceItem, _now_ns: int) -> list[SequenceItem]:
        batcher = self._batchers.get(item.instance)
        return batcher.answered(item) if batcher is not None else [item]

    def _offer(self, sequence: Sequence) -> None:
        if sequence.instance < 0 or sequence.in_flight or not sequence.queue:
            return
        if sequence.offered is None:
            item = sequence.offered = sequence.queue[0]
            batcher = self._batchers[sequence.instance]
            batcher.add(item, item.size, item.shape, 0, 0, item.arrived)

    def _restore(self, items: Series[SequenceItem]) -> None:
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
