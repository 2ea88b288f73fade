"""One request of an ensemble: which steps are due, and when it has an answer. Pure bookkeeping.

Knows no model and no memory: tensors are opaque values, None for one that is not there (an optional
input that was left out, an output that a member did not return).

A step whose model is decoupled answers any number of times. Each answer starts a *wave*: its tensors
and all that is made of them, up to the next such step. The request itself is the first wave. In a
wave every step runs once, and the wave that reaches the ensemble's outputs is one response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpubridge.engine.ensemble.graph import ROOT, EnsembleGraph, Step, Wiring

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Course:
    """Plan of the part of a graph that runs for a choice of outputs.

    - ``steps``: those that have to run.
    - ``uses``: by tensor, how often it is needed: by steps, and once as an output.
    - ``outputs``: in the order of the answer.
    - ``shared``: tensors that are needed more than once.
    - ``consumers``: by step, the model that takes its outputs, or the ensemble where several do; none for
      a step whose outputs no other takes.
    """

    graph: EnsembleGraph
    wiring: Wiring
    steps: frozenset[int]
    uses: dict[str, int]
    outputs: tuple[str, ...]
    shared: frozenset[str]
    consumers: dict[int, str]


def plan_course(graph: EnsembleGraph, wiring: Wiring, requested: Sequence[str]) -> Course:
    """Return what has to be run for some of the outputs; for all of them if none are named."""
    outputs = tuple(name for name in graph.outputs if not requested or name in requested)
    steps, tensors = graph.leading_to(outputs)
    uses = {
        tensor: sum(index in steps for index in graph.consumers.get(tensor, ()))
        + (tensor in outputs)
        for tensor in tensors
    }
    shared = frozenset(tensor for tensor, uses_of_it in uses.items() if uses_of_it > 1)
    consumers = {}
    for index in steps:
        takers = [graph.consumers.get(t, ()) for t in graph.steps[index].outputs.values()]
        models = {graph.steps[i].model for taken in takers for i in taken if i in steps}
        if models:
            consumers[index] = models.pop() if len(models) == 1 else graph.name
    return Course(graph, wiring, steps, uses, outputs, shared, consumers)


class _Wave(Generic[T]):
    """Tensors that belong together.

    - ``call``: what it is an answer of.
    - ``open``: what keeps it from being over: calls made from it, waves that came of those, its
      response.
    """

    __slots__ = ("begun", "call", "open", "origin", "response", "seen", "uses", "values")

    def __init__(self, origin: int, call: Call[T] | None, uses: Mapping[str, int]) -> None:
        self.origin = origin
        self.call = call
        self.values: dict[str, T] = {}
        self.seen: set[str] = set()
        self.uses = dict(uses)
        self.begun: set[int] = set()
        self.open = 0
        self.response: dict[str, T] | None = None

    def take(self, tensors: Iterable[str]) -> dict[str, T]:
        """Return those of some tensors that are there; each is forgotten after its last use."""
        taken = {}
        for tensor in dict.fromkeys(tensors):
            if tensor in self.values:
                taken[tensor] = self.values[tensor]
                self.uses[tensor] -= 1
                if not self.uses[tensor]:
                    del self.values[tensor]
        return taken


@dataclass(slots=True, eq=False)
class Call(Generic[T]):
    """One request to a member.

    ``inputs``: by the member's name of the input; those that are there. Its own from the start on.
    """

    step: Step
    inputs: dict[str, T]
    wave: _Wave[T]


@dataclass(slots=True)
class Progress(Generic[T]):
    """Result of an event.

    - ``responses``: of the ensemble, in order: tensors by name, those that are there.
    - ``passed_on``: calls of which one answer has been dealt with to the end, so that another may
      come; a call is named once for each.
    - ``over``: whether nothing comes any more.
    """

    calls: list[Call[T]] = field(default_factory=list)
    responses: list[dict[str, T]] = field(default_factory=list)
    passed_on: list[Call[T]] = field(default_factory=list)
    over: bool = False


class EnsembleRun(Generic[T]):
    """The state of one request; every event returns what is to be done.

    ``course``: what has to be run.
    """

    __slots__ = ("_coming", "_course", "_inflight", "_out", "_queued", "_unread")

    def __init__(self, course: Course) -> None:
        self._course = course
        # Calls that are under way, by step, and those that wait for their turn.
        self._inflight: dict[int, int] = {}
        self._queued: dict[int, deque[Call[T]]] = {}
        # Waves that will be a response, in order, and those whose response has not left yet.
        self._coming: deque[_Wave[T]] = deque()
        self._unread: deque[_Wave[T]] = deque()
        self._out: Progress[T] = Progress()

    # -- events ----------------------------------------------------------------------------------

    def begin(self, inputs: Mapping[str, T]) -> Progress[T]:
        """Start with the inputs that are there."""
        self._wave(ROOT, None, {name: inputs.get(name) for name in self._course.graph.inputs})
        return self._progress()

    def answered(self, call: Call[T], outputs: Mapping[str, T], *, last: bool) -> Progress[T]:
        """A member has answered; ``outputs`` by its names."""
        tensors = {tensor: outputs.get(name) for name, tensor in call.step.outputs.items()}
        index = call.step.index
        if index in self._course.wiring.fans_out:
            call.wave.open += 1
            self._wave(index, call, tensors)
        else:
            self._decide(call.wave, tensors)
        if last:
            self._end(call)
        return self._progress()

    def ended(self, call: Call[T]) -> Progress[T]:
        """A member will not answer any more."""
        self._end(call)
        return self._progress()

    def passed_on(self, responses: int) -> Progress[T]:
        """So many responses of the ensemble have left, the oldest first."""
        for _ in range(min(responses, len(self._unread))):
            self._close(self._unread.popleft())
        return self._progress()

    # -- what they do ----------------------------------------------------------------------------

    def _progress(self) -> Progress[T]:
        out, self._out = self._out, Progress()
        out.over = not any(self._inflight.values())
        return out

    def _wave(self, origin: int, call: Call[T] | None, tensors: Mapping[str, T | None]) -> None:
        """Begin a wave with its first tensors."""
        course = self._course
        wave: _Wave[T] = _Wave(origin, call, course.uses)
        # Not over before all that comes of the first tensors has begun.
        wave.open = 1
        if origin == course.wiring.output_origin:
            wave.open += 1
            self._coming.append(wave)
        self._decide(wave, tensors)
        self._close(wave)

    def _decide(self, wave: _Wave[T], tensors: Mapping[str, T | None]) -> None:
        """Learn tensors of a wave, and call whom they were the last to wait for."""
        course = self._course
        wave.seen.update(tensors)
        for tensor, value in tensors.items():
            if value is not None and course.uses.get(tensor):
                wave.values[tensor] = value
        after = {i for tensor in tensors for i in course.graph.consumers.get(tensor, ())}
        for index in sorted(after & course.steps - wave.begun):
            step = course.graph.steps[index]
            if wave.seen.issuperset(step.inputs.values()):
                self._call(wave, step)
        ends_here = wave.origin == course.wiring.output_origin and wave.response is None
        if ends_here and wave.seen.issuperset(course.outputs):
            wave.response = wave.take(course.outputs)
            self._respond()

    def _call(self, wave: _Wave[T], step: Step) -> None:
        taken = wave.take(step.inputs.values())
        inputs = {name: taken[tensor] for name, tensor in step.inputs.items() if tensor in taken}
        call = Call(step, inputs, wave)
        wave.begun.add(step.index)
        wave.open += 1
        limit = self._course.graph.max_inflight
        if limit and self._inflight.get(step.index, 0) >= limit:
            self._queued.setdefault(step.index, deque()).append(call)
        else:
            self._start(call)

    def _start(self, call: Call[T]) -> None:
        index = call.step.index
        self._inflight[index] = self._inflight.get(index, 0) + 1
        self._out.calls.append(call)

    def _end(self, call: Call[T]) -> None:
        index = call.step.index
        self._inflight[index] -= 1
        queue = self._queued.get(index)
        if queue:
            self._start(queue.popleft())
        self._close(call.wave)

    def _respond(self) -> None:
        """Hand out the responses whose turn it is."""
        coming = self._coming
        while coming and coming[0].response is not None:
            wave = coming.popleft()
            response, wave.response = wave.response, {}
            self._out.responses.append(response or {})
            self._unread.append(wave)

    def _close(self, wave: _Wave[T]) -> None:
        """One thing less keeps a wave from being over; when it is, its call may answer again."""
        wave.open -= 1
        while not wave.open and wave.call is not None:
            self._out.passed_on.append(wave.call)
            wave = wave.call.wave
            wave.open -= 1
