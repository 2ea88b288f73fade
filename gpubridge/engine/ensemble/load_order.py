"""In which order models are loaded: members before the ensembles that are made of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpubridge.config import ModelConfig

__all__ = ["load_stages", "required_models"]


def required_models(config: ModelConfig) -> list[str]:
    """Return the names of the models without which this one cannot work."""
    return sorted({step.model_name for step in config.message.ensemble_scheduling.step})


def load_stages(required: Mapping[str, Collection[str]]) -> tuple[list[list[str]], dict[str, str]]:
    """Sort models into stages, each of which needs only those before it.

    Parameters
    ----------
    required : mapping of str to collection of str
        Of every model, those that it is made of; names that are no keys are nobody's business here.

    Returns
    -------
    stages : list of list of str
    circular : dict of str to str
        The models that are made of themselves, and why they cannot be loaded.
    """
    circular = {name: text for name in required if (text := _circle(name, required))}
    stages = []
    left = {
        name: set(needs) & required.keys() - circular.keys() for name, needs in required.items()
    }
    for name in circular:
        del left[name]
    while left:
        stage = sorted(name for name, needs in left.items() if not needs & left.keys())
        stages.append(stage)
        for name in stage:
            del left[name]
    return stages, circular


def _circle(name: str, required: Mapping[str, Collection[str]]) -> str:
    """Say by which model a model leads back to itself; empty if it does not."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        at = waiting.pop()
        for needed in required.get(at, ()):
            if needed == name:
                return f"circular dependency between ensembles: {name} -> ... -> {at} -> {name}"
            if needed not in seen:
                seen.add(needed)
                waiting.append(needed)
    return ""
