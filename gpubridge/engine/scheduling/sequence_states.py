"""What the requests of a sequence leave to each other: handles that nobody here looks into."""

from __future__ import annotations

from collections.abc import Mapping

from gpubridge.engine.scheduling.sequence_item import Sequence
from gpubridge.engine.scheduling.sequence_settings import StateSpec

__all__ = ["StateStore"]


class StateStore:
    """Gives the states of a sequence to its next request and says which are no longer needed."""

    def __init__(self, specs: tuple[StateSpec, ...]) -> None:
        self._specs = specs
        self._names = frozenset(spec.output_name for spec in specs)
        self._unused: list[object] = []
        self.initial: tuple[tuple[StateSpec, object], ...] = tuple((spec, None) for spec in specs)

    def of(self, sequence: Sequence) -> tuple[tuple[StateSpec, object], ...]:
        """Return each state with its handle, or None where it has its initial value."""
        states = sequence.states
        if not states:
            return self.initial
        return tuple((spec, states.get(spec.output_name)) for spec in self._specs)

    def keep(self, sequence: Sequence, handles: Mapping[str, object]) -> None:
        """Replace the states of a sequence that are named; what it cannot use is unused at once."""
        for name, handle in handles.items():
            if sequence.closed or name not in self._names:
                self._unused.append(handle)
                continue
            if name in sequence.states:
                self._unused.append(sequence.states[name])
            sequence.states[name] = handle

    def drop(self, sequence: Sequence) -> None:
        """Let a sequence forget its states."""
        self._unused += sequence.states.values()
        sequence.states.clear()

    def unused(self) -> list[object]:
        """Give away the handles that no request will see any more."""
        handles, self._unused = self._unused, []
        return handles
