"""Execution plan of an ensemble, and the state of one request: which steps run next. Pure bookkeeping.

Independent of models and memory: tensors are opaque values, None for a missing one (an optional input
that was omitted, an output that a member did not return).

A step with a decoupled model sends any number of responses. Each response starts a *group*: its
tensors and all tensors computed from them, up to the next such step. The request itself is the first
group. In a group every step runs once; a group that reaches the ensemble's outputs is one response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpubridge.engine.ensemble.graph import ROOT, EnsembleGraph, Step, Wiring

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Plan of the part of a graph that runs for a choice of outputs.

    - ``steps``: the steps that run.
    - ``uses``: by tensor, the number of uses by steps, plus one if it is an output.
    - ``outputs``: in the order of the response.
    - ``shared``: tensors with more than one use.
    - ``consumers``: by step, the model that reads its outputs, or the ensemble if several do; no entry
      for a step whose outputs no other step reads.
    """

    graph: EnsembleGraph
    wiring: Wiring
    steps: frozenset[int]
    uses: dict[str, int]
    outputs: tuple[str, ...]
    shared: frozenset[str]
    consumers: dict[int, str]


def plan_execution(graph: EnsembleGraph, wiring: Wiring, requested: Sequence[str]) -> ExecutionPlan:
    """Return the plan for the requested outputs; for all outputs if none are requested."""
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
    return ExecutionPlan(graph, wiring, steps, uses, outputs, shared, consumers)


class _ResponseGroup(Generic[T]):
    """Tensors of one response of a decoupled step, or of the request.

    - ``call``: the call that sent the response.
    - ``open``: number of calls, groups and responses that still depend on it.
    """

    __slots__ = ("begun", "call", "open", "origin", "response", "seen", "uses", "values")

    def __init__(self, origin: int, call: MemberCall[T] | None, uses: Mapping[str, int]) -> None:
        self.origin = origin
        self.call = call
        self.values: dict[str, T] = {}
        self.seen: set[str] = set()
        self.uses = dict(uses)
        self.begun: set[int] = set()
        self.open = 0
        self.response: dict[str, T] | None = None

    def take(self, tensors: Iterable[str]) -> dict[str, T]:
        """Return the available ones of some tensors; remove each after its last use."""
        taken = {}
        for tensor in dict.fromkeys(tensors):
            if tensor in self.values:
                taken[tensor] = self.values[tensor]
                self.uses[tensor] -= 1
                if not self.uses[tensor]:
                    del self.values[tensor]
        return taken


@dataclass(slots=True, eq=False)
class MemberCall(Generic[T]):
    """One request to a member.

    ``inputs``: available inputs by the member's names; owned by the call.
    """

    step: Step
    inputs: dict[str, T]
    group: _ResponseGroup[T]


@dataclass(slots=True)
class Progress(Generic[T]):
    """Result of an event.

    - ``calls``: requests to send to members.
    - ``responses``: responses of the ensemble, in order: available tensors by name.
    - ``passed_on``: calls with one completely processed response each, so that another may come.
    - ``over``: whether the request is complete.
    """

    calls: list[MemberCall[T]] = field(default_factory=list)
    responses: list[dict[str, T]] = field(default_factory=list)
    passed_on: list[MemberCall[T]] = field(default_factory=list)
    over: bool = False


class ExecutionState(Generic[T]):
    """The state of one request; each event returns the next actions."""

    __slots__ = ("_coming", "_inflight", "_out", "_plan", "_queued", "_unread")

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        # By step: the number of running calls, and the calls that wait for the limit.
        self._inflight: dict[int, int] = {}
        self._queued: dict[int, deque[MemberCall[T]]] = {}
        # Groups that will be a response, in order, and groups whose response is not delivered yet.
        self._coming: deque[_ResponseGroup[T]] = deque()
        self._unread: deque[_ResponseGroup[T]] = deque()
        self._out: Progress[T] = Progress()

    # -- events ----------------------------------------------------------------------------------

    def begin(self, inputs: Mapping[str, T]) -> Progress[T]:
        """Start with the available inputs."""
        self._open_group(ROOT, None, {name: inputs.get(name) for name in self._plan.graph.inputs})
        return self._progress()

    def answered(self, call: MemberCall[T], outputs: Mapping[str, T], *, last: bool) -> Progress[T]:
        """Handle a member's response; ``outputs`` by its names."""
        tensors = {tensor: outputs.get(name) for name, tensor in call.step.outputs.items()}
        index = call.step.index
        if index in self._plan.wiring.fans_out:
            call.group.open += 1
            self._open_group(index, call, tensors)
        else:
            self._decide(call.group, tensors)
        if last:
            self._end(call)
        return self._progress()

    def ended(self, call: MemberCall[T]) -> Progress[T]:
        """Handle the end of a member's responses."""
        self._end(call)
        return self._progress()

    def passed_on(self, responses: int) -> Progress[T]:
        """Handle the delivery of ensemble responses, the oldest first."""
        for _ in range(min(responses, len(self._unread))):
            self._close(self._unread.popleft())
        return self._progress()

    # -- transitions ----------------------------------------------------------------------------

    def _progress(self) -> Progress[T]:
        out, self._out = self._out, Progress()
        out.over = not any(self._inflight.values())
        return out

    def _open_group(
        self, origin: int, call: MemberCall[T] | None, tensors: Mapping[str, T | None]
    ) -> None:
        """Begin a group with its first tensors."""
        plan = self._plan
        group: _ResponseGroup[T] = _ResponseGroup(origin, call, plan.uses)
        # Kept open until all calls from its first tensors have begun.
        group.open = 1
        if origin == plan.wiring.output_origin:
            group.open += 1
            self._coming.append(group)
        self._decide(group, tensors)
        self._close(group)

    def _decide(self, group: _ResponseGroup[T], tensors: Mapping[str, T | None]) -> None:
        """Add tensors to a group, and call the steps that have all their inputs now."""
        plan = self._plan
        group.seen.update(tensors)
        for tensor, value in tensors.items():
            if value is not None and plan.uses.get(tensor):
                group.values[tensor] = value
        after = {i for tensor in tensors for i in plan.graph.consumers.get(tensor, ())}
        for index in sorted(after & plan.steps - group.begun):
            step = plan.graph.steps[index]
            if group.seen.issuperset(step.inputs.values()):
                self._call(group, step)
        ends_here = group.origin == plan.wiring.output_origin and group.response is None
        if ends_here and group.seen.issuperset(plan.outputs):
            group.response = group.take(plan.outputs)
            self._respond()

    def _call(self, group: _ResponseGroup[T], step: Step) -> None:
        taken = group.take(step.inputs.values())
        inputs = {name: taken[tensor] for name, tensor in step.inputs.items() if tensor in taken}
        call = MemberCall(step, inputs, group)
        group.begun.add(step.index)
        group.open += 1
        limit = self._plan.graph.max_inflight
        if limit and self._inflight.get(step.index, 0) >= limit:
            self._queued.setdefault(step.index, deque()).append(call)
        else:
            self._start(call)

    def _start(self, call: MemberCall[T]) -> None:
        index = call.step.index
        self._inflight[index] = self._inflight.get(index, 0) + 1
        self._out.calls.append(call)

    def _end(self, call: MemberCall[T]) -> None:
        index = call.step.index
        self._inflight[index] -= 1
        queue = self._queued.get(index)
        if queue:
            self._start(queue.popleft())
        self._close(call.group)

    def _respond(self) -> None:
        """Emit the responses that are next in order."""
        coming = self._coming
        while coming and coming[0].response is not None:
            group = coming.popleft()
            response, group.response = group.response, {}
            self._out.responses.append(response or {})
            self._unread.append(group)

    def _close(self, group: _ResponseGroup[T]) -> None:
        """Remove a dependency of a group; when none is left, its call may respond again."""
        group.open -= 1
        while not group.open and group.call is not None:
            self._out.passed_on.append(group.call)
            group = group.call.group
            group.open -= 1
