"""Served versions of all models, listeners to changes, and old versions that still finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gpubridge.engine.ensemble.graph import is_ensemble
from gpubridge.engine.model import Model
from gpubridge.engine.model_loader import ModelSource, PreparedModel, required_models
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import invalid, not_found, unavailable

ModelState = Literal["", "LOADING", "READY", "UNLOADING", "UNAVAILABLE"]

_UNLOADED = "unloaded"

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionStatus:
    """A row of the repository index.

    - ``version``: 0 when not even the versions could be determined.
    - ``state``: empty for a model that was never loaded.
    - ``reason``: why it is unavailable.
    - ``wanted``: whether the server is not what it should be while this is unavailable.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    wanted: bool = True


class ModelIndex:
    """Keeps the rows."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, VersionStatus]] = {}

    def set(
        self, name: str, version: int, state: ModelState, reason: str = "", *, wanted: bool = True
    ) -> VersionStatus:
        """Say how a version is; returns the row, for `unloaded`."""
        row = VersionStatus(name, version, state, reason, wanted)
        rows = self._rows.setdefault(name, {})
        # Once its versions are known, that they were not is of no interest.
        rows.pop(0, None)
        rows[version] = row
        return row

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """List a model that was not listed as loading, until its versions are known."""
        row = None if self._rows.get(name) else self.set(name, 0, "LOADING")
        try:
            yield
        finally:
            if row is not None and self._rows.get(name, {}).get(0) is row:
                self.forget(name)

    def unloaded(self, row: VersionStatus) -> None:
        """Mark the version of a row as unloaded, unless another row has replaced it."""
        if self._rows.get(row.name, {}).get(row.version) is row:
            self.set(row.name, row.version, "UNAVAILABLE", _UNLOADED, wanted=False)

    def released(self, name: str) -> None:
        """Note that the model is no longer wanted: the reason why it did not load is no fault."""
        for row in self._rows.get(name, {}).values():
            row.wanted = False

    def forget(self, name: str) -> None:
        """There is no such model any more."""
        self._rows.pop(name, None)

    def versions(self, name: str) -> dict[int, VersionStatus]:
        """Return the rows of a model, by version."""
        return self._rows.get(name, {})

    def rows(self, present: Iterable[str] | None = None) -> list[VersionStatus]:
        """Return all rows, by name and version.

        ``present``: the models that the directories have, where they may have others than were
        loaded: each is listed, and no other but those that are served or on their way.
        """
        rows = [row for name in sorted(self._rows) for _, row in sorted(self._rows[name].items())]
        if present is None:
            return rows
        names = set(present)
        rows = [row for row in rows if row.name in names or row.state != "UNAVAILABLE"]
        rows += [VersionStatus(name, 0, "") for name in names.difference(r.name for r in rows)]
        return sorted(rows, key=lambda row: (row.name, row.version))

    @property
    def failures(self) -> list[VersionStatus]:
        """Return the versions that should be served and are not."""
        return [row for row in self.rows() if row.state == "UNAVAILABLE" and row.wanted]


@dataclass(slots=True)
class Served:
    """A model that is served.

    ``asked``: whether somebody wants it for itself, not for a model that requires it.
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
        # By themselves, not among the tasks that are cancelled at the end: they are hurried then.
        self._drains = TaskSet()

    # -- look-ups ------------------------------------------------------------------------------

    def find(self, name: str, version: int | None) -> Model:
        """Return a model that is served; its highest version when none is asked for.

        Raises BridgeError: NOT_FOUND, or UNAVAILABLE for a version that is not ready, in Triton's
        words.
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
            raise unavailable(f"{told} version {version} is not at ready state")
        if version is not None and rows:
            told += f" version {version}"
        elif any(rows):
            raise not_found(f"{told} has no available versions")
        raise not_found(f"{told} is not found")

    def versions(self, name: str) -> list[int]:
        """Return the versions of a model that are served, ascending."""
        return sorted(self._versions(name))

    def selected(self, name: str, version: int | None) -> list[Model]:
        """Return the loaded versions of a model, or the one asked for: whose statistics are wanted.

        Raises BridgeError: INVALID_ARG in Triton's words, which are other than those of
        :meth:`find`.
        """
        versions = self._versions(name)
        if not versions:
            raise invalid(f"requested model '{name}' is not available")
        if version is None:
            return [versions[number] for number in sorted(versions)]
        if version not in versions:
            raise invalid(f"requested model version is not available for model '{name}'")
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
        """Return the versions that should be served and are not."""
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
            self._index.set(name, version, "READY")
            _logger.info("successfully loaded '%s' version %d", name, version)
        if changed or served is None:
            for listener in self._listeners:
                listener(name)
        if was is not None:
            for version in changed & old.keys():
                row = None if version in models else self._index.set(name, version, "UNLOADING")
                self.retire(old[version], row, was.prepared.source)
            was.prepared.source.release()

    def retire(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        """Let a model that is given no more requests answer those that it has, and end."""
        source.hold()
        self._retiring.add(model)
        self._drains.start(self._drain(model, row, source))

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
        await self._drains.finished()


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
