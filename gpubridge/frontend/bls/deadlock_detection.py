"""Detection of deadlocks: calls of models that wait for each other in a circle.

An instance waits for each call in which an ``execute`` of it is blocked. A call waits for the instance
that executes its request or, before that, for any that may take it. What waits for nothing else may go on;
the rest never will. Calls of threads and tasks whose ``execute`` has returned block nobody, nor do those
that belong to no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpubridge.engine.ensemble.execution import Execution
from gpubridge.engine.models.model import Model
from gpubridge.engine.scheduling.settings import TimeoutAction
from gpubridge.engine.supervisor.instance import Instance
from gpubridge.errors import BridgeError
from gpubridge.request import InferRequest

if TYPE_CHECKING:
    from gpubridge.dataplane import Call


class Caller(Protocol):
    """Makes the calls of one process of an instance."""

    def calls_of_execute(self) -> Sequence[Call]:
        """Return the calls that are made for batches whose ``execute`` has not returned."""

    def ask_blocking(self, calls: Sequence[Call], /) -> None:
        """Ask in which of some calls an ``execute`` is blocked; `DeadlockWatch.look` follows."""

    def refuse_call(self, call: Call, error: BridgeError, /) -> None:
        """Answer a call with an error."""


class Deadlock(NamedTuple):
    """Calls that wait for each other.

    - ``path``: the names of the models of a circle, of which the first is the last, too.
    - ``unsure``: calls for which an ``execute`` may not wait, and who makes them: with them the others
      are a deadlock as well.
    """

    path: Sequence[str]
    unsure: Sequence[tuple[Caller, Call]]


class _Wait(NamedTuple):
    """A call in which an instance is blocked, who makes it, and the instances of which any may answer."""

    caller: Caller
    call: Call
    answering: Sequence[Instance]


class WaitGraph:
    """Tells who waits for whom, now.

    - ``callers``: returns those who make the calls of an instance.
    - ``sure``: whether only calls count in which an ``execute`` is known to be blocked.
    """

    def __init__(self, callers: Callable[[Instance], Iterable[Caller]], *, sure: bool) -> None:
        self._callers = callers
        self._sure = sure
        self._waits: dict[Instance, list[_Wait]] = {}
        self._free: set[Instance] = set()

    def deadlock(self, call: Call) -> Deadlock | None:
        """Return what keeps a call from ever being answered; None if it may be."""
        answering = _answering(call.request, call.form.model)
        if not answering:
            return None
        self._explore(answering)
        self._find_free()
        if not self._free.isdisjoint(answering):
            return None
        return Deadlock(self._path(answering), self._unsure(answering))

    def _explore(self, instances: Sequence[Instance]) -> None:
        left = list(instances)
        while left:
            instance = left.pop()
            if instance not in self._waits:
                self._waits[instance] = list(self._waits_of(instance))
                for wait in self._waits[instance]:
                    left += wait.answering

    def _waits_of(self, instance: Instance) -> Iterator[_Wait]:
        for caller in self._callers(instance):
            for call in caller.calls_of_execute():
                if call.blocks or not self._sure:
                    answering = _answering(call.request, call.form.model)
                    if answering:
                        yield _Wait(caller, call, answering)

    def _find_free(self) -> None:
        """Find the instances that end what they do, and then take other work."""
        grown = True
        while grown:
            grown = False
            for instance in self._waits:
                if instance not in self._free and not self._stuck(instance):
                    self._free.add(instance)
                    grown = True

    def _stuck(self, instance: Instance) -> list[_Wait]:
        return [each for each in self._waits[instance] if self._free.isdisjoint(each.answering)]

    def _path(self, answering: Sequence[Instance]) -> list[str]:
        path: list[str] = []
        while True:
            name = answering[0].settings.model
            if name in path:
                return [*path[path.index(name) :], name]
            path.append(name)
            answering = self._stuck(answering[0])[0].answering

    def _unsure(self, answering: Sequence[Instance]) -> list[tuple[Caller, Call]]:
        found: list[tuple[Caller, Call]] = []
        seen: set[Instance] = set()
        left = list(answering)
        while left:
            instance = left.pop()
            if instance in seen:
                continue
            seen.add(instance)
            for wait in self._stuck(instance):
                left += wait.answering
                if not wait.call.blocks:
                    found.append((wait.caller, wait.call))
        return found


def moves_on(request: InferRequest) -> bool:
    """Return whether a request may come to wait for other instances than those that have it now."""
    return not request.arrived or isinstance(request.instance, Execution)


def _answering(request: InferRequest, model: Model) -> Sequence[Instance]:
    """Return the instances of which any may answer a request; none where it may end without them."""
    place: Any = request.instance
    if isinstance(place, Execution):
        found: list[Instance] = []
        for member_request, member in place.running():
            answering = _answering(member_request, member)
            if not answering:
                # Its end, or its error, takes the ensemble on.
                return ()
            found += answering
        return found
    if place is None or not place.has_started(request):
        # What is looked up in the response cache has not arrived.
        return () if not request.arrived or _ends_by_time(model) else model.instances
    if not place.executes(request):
        # Threads or coroutines answer it.
        return ()
    return [
        instance
        for instance in model.instances
        if instance.run is not None and instance.run.connection.requests is place
    ]


def _ends_by_time(model: Model) -> bool:
    """Return whether requests of a model may be refused for the time that they wait."""
    scheduling = model.config.message.dynamic_batching
    policies = (scheduling.default_queue_policy, *scheduling.priority_queue_policy.values())
    return any(
        policy.default_timeout_microseconds and policy.timeout_action == TimeoutAction.REJECT.value
        for policy in policies
    )
