"""What is served: every model's versions, who hears when they change, and the last of the old ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpubridge.engine.ensemble.graph import is_ensemble
from gpubridge.engine.model import Model
from gpubridge.engine.model_index import ModelIndex, VersionStatus
from gpubridge.engine.model_loader import ModelSource, PreparedModel
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["Served", "ServedModels"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """A model that is served.

    Attributes
    ----------
    models : dict of int to Model
        By version.
    asked : bool
        Whether somebody wants it for itself, not for a model that requires it.
    """

    prepared: PreparedModel
    models: dict[int, Model]
    asked: bool = False


class ServedModels:
    """Holds the models; owns those that are served and those that answer their last requests.

    What is served of a model changes in one step, and listeners hear of it in the same step.
    """

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._index = ModelIndex()
        self._listeners: list[Callable[[str], None]] = []
        self._retiring: set[Model] = set()
        self._drains: set[asyncio.Task[None]] = set()

    # -- look-ups ------------------------------------------------------------------------------

    def find(self, name: str, version: int | None) -> Model:
        """Return a model that is served; its highest version when none is asked for.

        Raises
        ------
        BridgeError
            NOT_FOUND, or UNAVAILABLE for a version that is not ready, in Triton's words.
        """
        versions = self._versions(name)
        rows = self._index.versions(name)
        if versions and version is None:
            return versions[max(versions)]
        model = None if version is None else versions.get(version)
        if model is not None:
            return model
        told = f"Request for unknown model: '{name}'"
        if version is not None and version in rows:
            raise BridgeError(
                f"{told} version {version} is not at ready state", ErrorCode.UNAVAILABLE
            )
        if version is not None and rows:
            told += f" version {version}"
        elif any(rows):
            raise BridgeError(f"{told} has no available versions", ErrorCode.NOT_FOUND)
        raise BridgeError(f"{told} is not found", ErrorCode.NOT_FOUND)

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that are served, ascending."""
        return sorted(self._versions(name))

    def selected(self, name: str, version: int | None) -> list[Model]:
        """Return the loaded versions of a model, or the one asked for: whose statistics are wanted.

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words, which are other than those of :meth:`find`.
        """
        versions = self._versions(name)
        if not versions:
            raise BridgeError(f"requested model '{name}' is not available", ErrorCode.INVALID_ARG)
        if version is None:
            return [versions[number] for number in sorted(versions)]
        if version not in versions:
            raise BridgeError(
                f"requested model version is not available for model '{name}'",
                ErrorCode.INVALID_ARG,
            )
        return [versions[version]]

    def loaded(self) -> Iterator[Model]:
        """Every model version that is served, by name and version."""
        for name in sorted(self._served):
            models = self._served[name].models
            yield from [models[version] for version in sorted(models)]

    def index(self) -> list[VersionStatus]:
        """The repository index, by name and version."""
        return self._index.rows()

    @property
    def failures(self) -> list[VersionStatus]:
        """What should be served and is not."""
        return self._index.failures

    def _versions(self, name: str) -> Mapping[int, Model]:
        served = self._served.get(name)
        return {} if served is None else served.models

    def running(self) -> list[Model]:
        """Every model that may have requests."""
        return [*self.loaded(), *self._retiring]

    # -- changes -------------------------------------------------------------------------------

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have a function called with a model's name whenever what is served of it has changed."""
        self._listeners.append(listener)

    def switch(self, name: str, served: Served | None) -> None:
        """Serve other versions of a model than before, in one step; the old ones answer their last."""
        was = self._served.pop(name, None)
        old = was.models if was is not None else {}
        models: Mapping[int, Model] = {}
        if served is not None:
            self._served[name] = served
            served.prepared.source.hold()
            models = served.models
        changed = {v for v in old.keys() | models.keys() if old.get(v) is not models.get(v)}
        for version in sorted(changed & models.keys()):
            self._index.ready(name, version)
            _logger.info("successfully loaded '%s' version %d", name, version)
        if changed or served is None:
            for listener in self._listeners:
                listener(name)
        if was is not None:
            for version in changed & old.keys():
                row = None if version in models else self._index.unloading(name, version)
                self.retire(old[version], row, was.prepared.source)
            was.prepared.source.release()

    def retire(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        """Let a model that is given no more requests answer those that it has, and end."""
        source.hold()
        self._retiring.add(model)
        task = asyncio.get_running_loop().create_task(self._drain(model, row, source))
        # Kept by itself, not among the tasks that are cancelled at the end: it is hurried then.
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        try:
            await model.unload(None)
        finally:
            self._retiring.discard(model)
            source.release()
            if row is not None:
                self._index.unloaded(row)
        _logger.info("successfully unloaded '%s' version %d", model.name, model.version)

    async def end(self, seconds: float) -> None:
        """Serve nothing any more, and wait until every request is answered, or the time is up."""
        for model in self._retiring:
            model.hurry(seconds)
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        models = list(self.loaded())
        # Ensembles first: what they have under way needs the others.
        await asyncio.gather(*(m.unload(seconds) for m in models if is_ensemble(m.config)))
        self._served.clear()
        left = max(0.0, deadline - clock())
        await asyncio.gather(*(m.unload(left) for m in models if not is_ensemble(m.config)))
        await asyncio.gather(*self._drains, return_exceptions=True)
