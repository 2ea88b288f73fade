"""The direct strategy: a sequence keeps one place in every batch of its instance."""

from __future__ import annotations

from collections.abc import Iterator

from gpubridge.engine.scheduling.sequence import SequenceScheduler
from gpubridge.engine.scheduling.sequence_item import Sequence, SequenceItem
from gpubridge.engine.scheduling.sequence_settings import DirectStrategy, SequenceBatching

__all__ = ["DirectSequenceScheduler"]


class DirectSequenceScheduler(SequenceScheduler):
    """Batches in which the n-th place is always that of the sequence in slot n.

    Places below the last request's that no request fills get padding. An instance has one
    batch at a time. Requests whose shapes differ from those of the one that waits longest sit a
    batch out.

    Parameters
    ----------
    settings : SequenceBatching
    strategy : DirectStrategy
    model : str
    max_batch_size : int
    """

    def __init__(
        self, settings: SequenceBatching, strategy: DirectStrategy, model: str, max_batch_size: int
    ) -> None:
        super().__init__(settings, model, max_batch_size, max(max_batch_size, 1))
        self._delay_ns = strategy.max_queue_delay_us * 1000
        self._utilization = strategy.minimum_slot_utilization
        self._at_work: dict[int, int] = {}

    def take(self, instance: int, now_ns: int) -> list[SequenceItem] | None:
        """Give away the next batch of an instance if it is due, with control tensors and slots.

        Returns
        -------
        list of SequenceItem or None
            One per slot, from the first on; padding has `request` None and a `pattern`.
        """
        self._age(now_ns)
        due = self._due_at(instance)
        if due is None or due > now_ns:
            return None
        seats = self._seats[instance]
        fronts = [s.queue[0] if s is not None and s.queue else None for s in seats]
        # Whose turn it is decides about the shapes: so no shape can starve another.
        pattern = min(filter(None, fronts), key=lambda item: item.arrived)
        batch: list[SequenceItem] = []
        last = 0
        for item in fronts:
            if item is not None and item.shape == pattern.shape:
                self._hand_out(item)
                batch.append(item)
                last = len(batch)
                self._at_work[instance] = self._at_work.get(instance, 0) + 1
            else:
                batch.append(self._padding(pattern))
        del batch[last:]
        return batch

    def _padding(self, pattern: SequenceItem) -> SequenceItem:
        item = SequenceItem(None, shape=pattern.shape)
        item.pattern = pattern
        item.controls = self._controls.of_padding()
        return item

    def _due_at(self, instance: int) -> int | None:
        """Return from when on an instance's next batch is due; None for not without new requests."""
        if self._at_work.get(instance):
            return None
        ready = [
            seat.queue[0].arrived
            for seat in self._seats.get(instance, ())
            if seat is not None and seat.queue
        ]
        if not ready:
            return None
        first = min(ready)
        if not self._delay_ns or len(ready) >= self._utilization * self._slots:
            return first
        return first + self._delay_ns

    def _batch_times(self, now_ns: int) -> Iterator[int]:
        for instance in self._seats:
            due = self._due_at(instance)
            if due is not None and due > now_ns:
                yield due

    def _landed(self, sequence: Sequence) -> None:
        super()._landed(sequence)
        self._at_work[sequence.instance] -= 1

    def _instance_removed(self, instance: int) -> None:
        self._at_work.pop(instance, None)
