"""Served versions of all models, the repository index, and replaced versions that drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gpubridge.engine.ensemble.graph import is_ensemble
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.loader import ModelSource, PreparedModel, required_models
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import invalid, not_found, unavailable

ModelState = Literal["", "LOADING", "READY", "UNLOADING", "UNAVAILABLE"]

_UNLOADED = "unloaded"

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionStatus:
    """A row of the repository index.

    - ``version``: 0 if the versions are unknown.
    - ``state``: empty for a model that was never loaded.
    - ``reason``: why it is unavailable.
    - ``wanted``: whether it should be served, so that the server is not ready without it.
    """

    name: str
    version: int
    state: ModelState
    reason: str = ""
    wanted: bool = True


class ModelIndex:
    """The repository index: one row per model version."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, VersionStatus]] = {}

    def set(
        self, name: str, version: int, state: ModelState, reason: str = "", *, wanted: bool = True
    ) -> VersionStatus:
        """Set the state of a version; return the row, for `unloaded`."""
        row = VersionStatus(name, version, state, reason, wanted)
        rows = self._rows.setdefault(name, {})
        # Known versions replace the row of unknown versions.
        rows.pop(0, None)
        rows[version] = row
        return row

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """List an unknown model as loading until its versions are known."""
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
        """Mark a model as not wanted: its failure to load no longer counts."""
        for row in self._rows.get(name, {}).values():
            row.wanted = False

    def forget(self, name: str) -> None:
        """Remove a model."""
        self._rows.pop(name, None)

    def versions(self, name: str) -> dict[int, VersionStatus]:
        """Return the rows of a model, by version."""
        return self._rows.get(name, {})

    def rows(self, present: Iterable[str] | None = None) -> list[VersionStatus]:
        """Return all rows, by name and version.

        ``present``: the models in the repositories; adds rows for unloaded ones, and omits
        unavailable models that are not there.
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
    """A served model.

    - ``sources``: of each version's files, which may be older than those of ``prepared``.
    - ``asked``: whether it was loaded explicitly, not only because another model requires it.
    """

    prepared: PreparedModel
    models: dict[int, Model]
    sources: dict[int, ModelSource]
    asked: bool = False


class ServedModels:
    """Owns the served models and those that complete their last requests.

    The served versions of a model change atomically, and listeners are called in the same step.
    """

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._index = ModelIndex()
        self._listeners: list[Callable[[str], None]] = []
        self._retiring: set[Model] = set()
        # Not cancelled at the end like other tasks: they get a deadline.
        self._drains = TaskSet()

    # -- look-ups ------------------------------------------------------------------------------

    def find(self, name: str, version: int | None) -> Model:
        """Return a served version of a model; the highest if ``version`` is None.

        Raises BridgeError: NOT_FOUND, or UNAVAILABLE for a version that is not ready, in Triton's
        words.
        """
        versions = self._versions(name)
        if versions and version is None:
            return versions[max(versions)]
        model = None if version is None else versions.get(version)
        if model is not None:
            return model
        rows = self._index.versions(name)
        text = f"Request for unknown model: '{name}'"
        if version is not None and version in rows:
            raise unavailable(f"{text} version {version} is not at ready state")
        if version is not None and rows:
            text += f" version {version}"
        elif any(rows):
            raise not_found(f"{text} has no available versions")
        raise not_found(f"{text} is not found")

    def versions(self, name: str) -> list[int]:
        """Return the served versions of a model, ascending."""
        return sorted(self._versions(name))

    def selected(self, name: str, version: int | None) -> list[Model]:
        """Return the served versions of a model, or one of them, for statistics.

        Raises BridgeError: INVALID_ARG, in Triton's words, which differ from those of :meth:`find`.
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
        """Yield every served model version, by name and version."""
        for name in sorted(self._served):
            models = self._served[name].models
            yield from [models[version] for version in sorted(models)]

    def index(self) -> list[VersionStatus]:
        """Return the repository index, by name and version."""
        return self._index.rows()

    @property
    def failures(self) -> list[VersionStatus]:
        """Return the versions that should be served and are not."""
        return self._index.failures

    def _versions(self, name: str) -> Mapping[int, Model]:
        served = self._served.get(name)
        return {} if served is None else served.models

    def running(self) -> list[Model]:
        """Return every model that may have requests, including draining ones."""
        return [*self.loaded(), *self._retiring]

    # -- changes -------------------------------------------------------------------------------

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call a function with a model's name whenever its served versions change."""
        self._listeners.append(listener)

    def switch(self, name: str, served: Served | None) -> None:
        """Replace the served versions of a model atomically; the old ones drain."""
        was = self._served.pop(name, None)
        old = was.models if was is not None else {}
        models: Mapping[int, Model] = {}
        if served is not None:
            self._served[name] = served
            for source in served.sources.values():
                source.hold()
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
                self.retire(old[version], row, was.sources[version])
            for source in was.sources.values():
                source.release()

    def retire(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        """Drain and unload a model that gets no new requests."""
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
        """Stop serving; wait until every request is completed, at most ``seconds``."""
        for model in self._retiring:
            model.set_deadline(seconds)
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        models = list(self.loaded())
        # Ensembles first: their running executions need the other models.
        await asyncio.gather(*(m.unload(seconds) for m in models if is_ensemble(m.config)))
        self._served.clear()
        left = max(0.0, deadline - clock())
        await asyncio.gather(*(m.unload(left) for m in models if not is_ensemble(m.config)))
        await self._drains.finished()


class EnsembleDependents:
    """Ensembles that were unloaded with a required model, to be loaded again with it."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[frozenset[str], str | None]] = {}

    def remember(self, name: str, served: Served) -> None:
        """Remember an ensemble that is unloaded with a required model, if it was loaded explicitly.

        Ensembles from files that a client sent are skipped, as their files are removed.
        """
        source = served.prepared.source
        if served.asked and not source.digest:
            required = frozenset(required_models(served.prepared.config))
            self._waiting[name] = required, source.config

    def forget(self, name: str) -> None:
        """Forget a model that was loaded again or unloaded explicitly."""
        self._waiting.pop(name, None)

    def possible(self, name: str, served: Container[str]) -> list[tuple[str, str | None]]:
        """Return the remembered ensembles, and configurations, whose last missing model is ``name``."""
        return [
            (other, config)
            for other, (required, config) in self._waiting.items()
            if name in required and all(each in served for each in required)
        ]
