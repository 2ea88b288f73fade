"""Durations of an ensemble's steps, and of the waits of tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpubridge.engine.ensemble.graph import ROOT, EnsembleGraph, Step

RESPONSE = -2
"""The consumer of the ensemble's outputs."""


class Edge(NamedTuple):
    """Tensors that one step, or the request (`ROOT`), passes to another, or to the `RESPONSE`.

    ``passed``, ``wait_ns``: how often they were passed, and how long they waited for the consumer to begin,
    since it needs others, too.
    """

    source: int
    target: int
    tensors: tuple[str, ...]
    passed: int
    wait_ns: int


class EnsembleTimes:
    """Sums over the requests of an ensemble since it was loaded."""

    def __init__(self, graph: EnsembleGraph) -> None:
        self.steps = graph.steps
        self._spent = [[0, 0] for _ in graph.steps]
        needed: dict[int, Iterable[str]] = {
            step.index: step.inputs.values() for step in graph.steps
        }
        needed[RESPONSE] = graph.outputs
        # By consumer, then by producer: the tensors, the number of waits, their nanoseconds.
        self._waits: dict[int, dict[int, tuple[list[str], list[int]]]] = {}
        for target, tensors in needed.items():
            sources = self._waits[target] = {}
            for tensor in dict.fromkeys(tensors):
                source = graph.producers.get(tensor, ROOT)
                sources.setdefault(source, ([], [0, 0]))[0].append(tensor)

    def begun(self, target: int, ended: Mapping[int, int], now: int) -> None:
        """Count the waits of the inputs of a step that begins, or of the outputs of the response.

        ``ended``: when each producer had its outputs; those that did not run are missing.
        """
        for source, (_, sums) in self._waits[target].items():
            if source in ended:
                sums[0] += 1
                sums[1] += now - ended[source]

    def done(self, step: int, spent_ns: int) -> None:
        """Count a request to a member, from its begin to its last response."""
        sums = self._spent[step]
        sums[0] += 1
        sums[1] += spent_ns

    def durations(self) -> Iterator[tuple[Step, int, int]]:
        """Yield each step with its requests and the sum of their nanoseconds."""
        for step, (count, spent_ns) in zip(self.steps, self._spent, strict=True):
            yield step, count, spent_ns

    def edges(self) -> Iterator[Edge]:
        """Yield the edges of the graph."""
        for target, sources in self._waits.items():
            for source, (tensors, (count, wait_ns)) in sources.items():
                yield Edge(source, target, tuple(tensors), count, wait_ns)
