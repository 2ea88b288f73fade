"""Models that went because one that they require went: they come back with it."""

from __future__ import annotations

from collections.abc import Container

from gpubridge.engine.model_loader import ModelSource, required_models
from gpubridge.engine.served_models import Served

__all__ = ["Dependents"]


class Dependents:
    """Remembers which models are wanted although they cannot be served at present."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[frozenset[str], ModelSource]] = {}

    def gone(self, name: str, served: Served) -> None:
        """Somebody wants a model that goes with one that it requires.

        One that is made of files that a client sent is not remembered: they go with it.
        """
        source = served.prepared.source
        if served.asked and source.overrides is None:
            required = frozenset(required_models(served.prepared.config))
            self._waiting[name] = required, ModelSource(source.directory, source.config)

    def forget(self, name: str) -> None:
        """A model is there again, or nobody wants it any more."""
        self._waiting.pop(name, None)

    def possible(self, name: str, served: Container[str]) -> list[tuple[str, ModelSource]]:
        """Return the models that require this one and lack no other, and where they come from."""
        return [
            (other, source)
            for other, (required, source) in self._waiting.items()
            if name in required and all(each in served for each in required)
        ]
