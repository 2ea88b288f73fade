"""Detection of deadlocks: calls of models that would wait for each other in a cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpubridge.engine.supervisor.instance import Instance


def find_cycle(
    caller: Instance, target: str, instances: Callable[[str], Iterable[Instance]]
) -> list[str]:
    """Return the models of a cycle that a call would close, from its target back to it; or nothing.

    An instance can progress if all models that its calls wait for can; a model can if one of its
    instances can. The models that cannot progress wait for each other.

    - ``caller``: the calling instance, which knows its other calls.
    - ``target``: the called model.
    - ``instances``: returns the instances of all versions of a model.
    """
    for each in instances(target):
        if not each.waits_for and each is not caller:
            return []
    # Without a batch in flight, the caller blocks nothing.
    return _cycle(caller, target, instances) if caller.feed.in_flight else []


def _cycle(
    caller: Instance, target: str, instances: Callable[[str], Iterable[Instance]]
) -> list[str]:
    found = {target: list(instances(target))}
    waiting = [target]
    while waiting:
        for instance in found[waiting.pop()]:
            for model in instance.waits_for:
                if model not in found:
                    found[model] = list(instances(model))
                    waiting.append(model)
    alive: set[str] = set()
    grown = True
    while grown:
        grown = False
        for model, members in found.items():
            if model not in alive and (
                not members or any(_can_progress(each, caller, target, alive) for each in members)
            ):
                alive.add(model)
                grown = True
    return [] if target in alive else _path(target, caller, found, alive)


def _can_progress(instance: Instance, caller: Instance, target: str, alive: set[str]) -> bool:
    if not instance.feed.in_flight:
        return True
    calls = set(instance.waits_for)
    if instance is caller:
        calls.add(target)
    return calls <= alive


def _path(
    target: str, caller: Instance, found: dict[str, list[Instance]], alive: set[str]
) -> list[str]:
    """Return the cycle from its target back to it."""
    path = [target]
    while True:
        member = found[path[-1]][0]
        ahead = [model for model in member.waits_for if model not in alive]
        if member is caller or not ahead or ahead[0] in path:
            return [*path, target]
        path.append(ahead[0])
