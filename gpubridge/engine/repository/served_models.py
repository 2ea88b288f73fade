"""Served versions of all models, ensembles on what is served, and replaced versions that drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpubridge.engine.ensemble.graph import circular_dependency, explain_missing
from gpubridge.engine.load_progress import LoadProgress
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.loader import (
    LoadError,
    LoadFailed,
    ModelSource,
    PreparedModel,
    load_refused,
)
from gpubridge.engine.repository.model_index import ModelIndex, ModelState, VersionStatus
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import BridgeError, invalid, not_found, unavailable
from gpubridge.telemetry.logs import request_error

MakeEnsemble = Callable[[PreparedModel, int, Sequence[Model]], Model]
"""Makes a version of an ensemble on the models of its steps; raises BridgeError if they do not fit."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model.

    - ``models``: its served versions; none of an ensemble that its members do not allow at present.
    - ``sources``: of the files of each version that stubs execute, which may be older than those of
      ``prepared``.
    - ``asked``: whether it was loaded explicitly, not only because another model requires it.
    - ``waiting``: what an ensemble was loaded as last, if its members do not allow that yet: it is
      served in place of ``prepared`` as soon as they do.
    """

    prepared: PreparedModel
    models: Mapping[int, Model]
    sources: Mapping[int, ModelSource] = field(default_factory=dict)
    asked: bool = False
    waiting: PreparedModel | None = None

    @property
    def latest(self) -> PreparedModel:
        """Return what it was loaded as last."""
        return self.waiting or self.prepared

    @property
    def required(self) -> frozenset[str]:
        """Return the models that it requires, or will require."""
        later = frozenset() if self.waiting is None else self.waiting.required
        return self.prepared.required | later

    def source(self, version: int) -> ModelSource:
        """Return the source of a served version."""
        return self.sources.get(version, self.prepared.source)

    def held(self) -> list[ModelSource]:
        """Return the sources whose directories must stay."""
        waiting = [] if self.waiting is None else [self.waiting.source]
        return [*self.sources.values(), self.prepared.source, *waiting]


class ServedModels:
    """Owns the served models and those that complete their last requests.

    Served versions change atomically: a model's together with those of all ensembles that are affected,
    which are built on the new versions of their members or, if these do not allow it, not served until
    they do. Listeners are called in the same step. Replaced versions drain, ensembles before the members
    that they send requests to.
    """

    def __init__(self, make_ensemble: MakeEnsemble, progress: LoadProgress) -> None:
        self.progress = progress
        self._make_ensemble = make_ensemble
        self._served: dict[str, Served] = {}
        self._index = ModelIndex()
        self._listeners: list[Callable[[str], None]] = []
        self._retiring: dict[Model, asyncio.Task[None]] = {}
        # When models that drain must have ended, of the event loop's clock.
        self._deadline: float | None = None
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

    def switch(self, name: str, served: Served | None) -> LoadError | None:
        """Replace the served versions of a model, and of ensembles with it; the old ones drain.

        Returns why the model, if it is an ensemble, is not served as it was loaded last.
        """
        before = dict(self._served)
        self._put(name, served)
        return self._settle(before).get(name)

    def list_reasons(self) -> None:
        """List anew why ensembles are not served, which names states of members that have changed."""
        self._settle(dict(self._served))

    def _settle(self, before: dict[str, Served]) -> dict[str, LoadError]:
        """Serve ensembles by what is served now, and retire what was served before and is not any more.

        Returns why some ensembles are not served as they were loaded last.
        """
        errors = self._bind_ensembles()
        changes = [
            (each, before.get(each), self._served.get(each))
            for each in before | self._served
            if before.get(each) is not self._served.get(each)
        ]
        for each, was, now in changes:
            if now is not None:
                self._log_change(now, {} if was is None else was.models, errors.get(each))
            for source in [] if now is None else now.held():
                source.hold()
        for each, was, now in changes:
            if was is None or now is None or was.models != now.models:
                for listener in self._listeners:
                    listener(each)
        for each, was, now in changes:
            if was is not None:
                self._retire_replaced(each, was, {} if now is None else now.models)
        return errors

    def is_needed(self, name: str) -> bool:
        """Return whether a loaded ensemble requires a model."""
        return any(name in served.required for served in self._served.values())

    def _put(self, name: str, served: Served | None) -> None:
        """Replace a model's entry and its rows in the index."""
        was = self._served.pop(name, None)
        old: Mapping[int, Model] = {} if was is None else was.models
        models: Mapping[int, Model] = {}
        if served is not None:
            models = served.models
            self._served[name] = served
            self._index.keep_wanted(name, served.prepared.versions)
        elif was is not None and not old:
            self._index.unloaded_unserved(name)
        for version in sorted(old.keys() | models.keys()):
            if old.get(version) is not models.get(version):
                state: ModelState = "READY" if version in models else "UNLOADING"
                self._index.set(name, version, state)

    def _log_change(
        self, served: Served, old: Mapping[int, Model], error: LoadError | None
    ) -> None:
        """Log the versions of a model that are served now, or why those of an ensemble are not."""
        name = served.prepared.config.name
        for version in sorted(served.models):
            if old.get(version) is not served.models[version]:
                level = self.progress.level
                _logger.log(level, "successfully loaded '%s' version %d", name, version)
        if error is not None and old and not served.models:
            reason = error.why(min(old))
            _logger.warning("ensemble '%s' is unloaded until it can be served: %s", name, reason)

    def _retire_replaced(self, name: str, was: Served, models: Mapping[int, Model]) -> None:
        """Retire versions that are no longer served, and release their files."""
        for version, model in was.models.items():
            if models.get(version) is not model:
                row = None if version in models else self._index.versions(name)[version]
                self.retire(model, row, was.source(version))
        for source in was.held():
            source.release()

    # -- ensembles -----------------------------------------------------------------------------

    def _bind_ensembles(self) -> dict[str, LoadError]:
        """Build the ensembles whose members have changed; return why some are not served as loaded."""
        while True:
            errors: dict[str, LoadError] = {}
            for name in self._members_first():
                served = self._served[name]
                try:
                    models = self._on_members(name, served.prepared)
                except LoadError as error:
                    errors[name] = error
                    models = {}
                if models != served.models:
                    self._put(name, replace(served, models=models))
                if name in errors:
                    self._tell_unserved(name, errors[name])
            if not self._use_waiting(errors):
                return errors

    def _use_waiting(self, errors: dict[str, LoadError]) -> bool:
        """Serve one ensemble as it was loaded last, if its members allow that now."""
        for name, served in self._served.items():
            if served.waiting is None:
                continue
            try:
                models = self._on_members(name, served.waiting)
            except LoadError as error:
                errors[name] = error
                continue
            self._put(name, Served(served.waiting, models, asked=served.asked))
            return True
        return False

    def _members_first(self) -> list[str]:
        """Return the ensembles, each after those that it requires."""
        order: dict[str, None] = {}
        seen: set[str] = set()

        def visit(name: str) -> None:
            served = self._served.get(name)
            if name in seen or served is None or served.prepared.graph is None:
                return
            seen.add(name)
            for each in sorted(served.prepared.required):
                visit(each)
            order[name] = None

        for name in sorted(self._served):
            visit(name)
        return list(order)

    def _on_members(self, name: str, prepared: PreparedModel) -> dict[int, Model]:
        """Return the versions of an ensemble on the served versions of its members; raises LoadError."""
        served = self._served[name]
        members = self._members(name, prepared)
        same = prepared is served.prepared
        kept = {
            version: model
            for version, model in served.models.items()
            if tuple(model.members) == members
            and (same or prepared.same_version(served.prepared, version))
        }
        try:
            models = {
                version: kept.get(version) or self._make_ensemble(prepared, version, members)
                for version in prepared.versions
            }
        except Exception as raised:
            # Even a bug of gpubridge concerns this ensemble only, whichever model is switched.
            error = request_error(raised, "load")
            raise LoadFailed(name, dict.fromkeys(prepared.versions, error)) from raised
        if not same:
            for model in kept.values():
                model.config = model.config.with_version_policy(prepared.config)
        return models

    def _members(self, name: str, prepared: PreparedModel) -> tuple[Model, ...]:
        """Return the served models of an ensemble's steps; raises NotPrepared."""
        members = []
        for step in [] if prepared.graph is None else prepared.graph.steps:
            if self._leads_to(step.model, name):
                raise load_refused(name, circular_dependency(name, step.model))
            try:
                members.append(self.find(step.model, step.version))
            except BridgeError as error:
                rows = self._index.versions(step.model)
                reason = explain_missing(name, step.model, step.version, rows)
                raise load_refused(name, reason) from error
        return tuple(members)

    def _leads_to(self, start: str, end: str) -> bool:
        """Return whether a model is another one or requires it, directly or indirectly."""
        found = {start}
        left = [start]
        while left:
            served = self._served.get(left.pop())
            fresh = (frozenset() if served is None else served.prepared.required) - found
            found |= fresh
            left += fresh
        return end in found

    def _tell_unserved(self, name: str, error: LoadError) -> None:
        """List why an ensemble is not served; a load of it in progress does so at its end."""
        rows = self._index.versions(name)
        for version in self._served[name].prepared.versions:
            row = rows.get(version)
            if row is None:
                self._index.set(name, version, "UNAVAILABLE", error.why(version), wanted=False)
            elif row.state != "LOADING":
                row.reason = error.why(version)

    # -- replaced versions ---------------------------------------------------------------------

    def retire(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        """Drain and unload a model that gets no new requests.

        - ``row``: its row in the index, unless another version has it.
        - ``source``: held until the model is unloaded.
        """
        source.hold()
        self._retiring[model] = self._drains.start(self._drain(model, row, source))

    async def _drain(self, model: Model, row: VersionStatus | None, source: ModelSource) -> None:
        try:
            # Those on newer members are other objects, so no further ensemble begins to use this one.
            users = [task for other, task in self._retiring.items() if model in other.members]
            if users:
                await asyncio.wait(users)
            await model.unload(self._deadline)
        finally:
            del self._retiring[model]
            source.release()
            if row is not None:
                self._index.unloaded(row)
                self.list_reasons()
        _logger.info("successfully unloaded '%s' version %d", model.name, model.version)

    async def end(self, seconds: float) -> None:
        """Stop serving; wait until every request is completed, at most ``seconds``."""
        self._deadline = asyncio.get_running_loop().time() + seconds
        for model in self._retiring:
            model.set_deadline(self._deadline)
        # Models that ensembles do not name, but call, are needed until those have ended.
        ensembles = [served for served in self._served.values() if served.prepared.graph]
        others = [served for served in self._served.values() if not served.prepared.graph]
        for group in (ensembles, others):
            for served in group:
                for version, model in served.models.items():
                    self.retire(model, None, served.source(version))
            await self._drains.finished()
        self._served.clear()
