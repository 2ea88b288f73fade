"""The model repository: loads, unloads and replaces models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any

from gpubridge.config import ServerSettings
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.models.model import Model, StubModel
from gpubridge.engine.repository.loader import (
    LoadError,
    LoadFailed,
    ModelLoader,
    ModelSource,
    NotPrepared,
    NoVersion,
    PreparedModel,
    load_refused,
)
from gpubridge.engine.repository.locks import ModelLocks
from gpubridge.engine.repository.model_index import VersionStatus
from gpubridge.engine.repository.model_sources import ModelSources, RepositoryPoller
from gpubridge.engine.repository.remote import open_repositories
from gpubridge.engine.repository.served_models import Served, ServedModels
from gpubridge.engine.workers import TaskSet, repeat
from gpubridge.errors import BridgeError, unavailable

_TICK_SECONDS = 5.0
_IDLE_SECONDS = 30.0

_logger = logging.getLogger(__name__)

ALL_MODELS = "*"
"""Name of all models in the repositories."""


async def run_maintenance(
    running: Callable[[], Iterable[Model]], limit: float | None, regions: Regions
) -> None:
    """Enforce time limits and release idle memory, until cancelled.

    What fails for one model by a bug of gpubridge is done for the others.
    """

    def for_all(act: Callable[[Model], None]) -> Iterator[Exception]:
        for model in list(running()):
            try:
                act(model)
            except Exception as error:  # noqa: BLE001  (of this model, for the log)
                yield error

    async def check() -> None:
        for error in list(for_all(lambda model: model.check_time_limit())):
            raise error

    async def maintain() -> None:
        errors = list(for_all(lambda model: model.maintain()))
        regions.trim(_IDLE_SECONDS)
        for error in errors:
            raise error

    maintaining = repeat("round of maintenance", _TICK_SECONDS, maintain)
    if limit is None:
        await maintaining
    else:
        tick = min(_TICK_SECONDS, max(limit / 8, 0.02))
        await asyncio.gather(repeat("check of execute's time limit", tick, check), maintaining)


class ModelRepository(ServedModels):
    """Loads and owns models, files that clients sent, and request arenas.

    Loads and unloads of one model run one after the other, those of different models concurrently.
    """

    def __init__(self, settings: ServerSettings, loader: ModelLoader) -> None:
        super().__init__(loader.ensemble, loader.context.progress)
        self._settings = settings
        self.server_id = settings.process.server_id
        self._loader = loader
        self.regions = loader.context.regions
        self.devices = loader.context.devices
        self.telemetry = loader.context.telemetry
        self.metrics = loader.context.metrics
        self.threads = loader.context.threads
        self.telemetry.log.on_change(self._set_log_levels)
        self._sources = ModelSources(
            self.threads,
            open_repositories(settings.repository),
            settings.repository.model_directories,
            self.progress,
            required=settings.repository.exit_on_error,
        )
        self._locks = ModelLocks()
        self._tasks = TaskSet()
        self._closing = False

    # -- life ----------------------------------------------------------------------------------

    async def load_initial(self) -> None:
        """Load the initial models; the index gets the errors of failed loads."""
        settings = self._settings
        self._tasks.start(
            run_maintenance(
                self.running, self._loader.context.backend.execute_timeout_seconds, self.regions
            )
        )
        if (
            settings.repository.model_control_mode == "poll"
            and settings.repository.repository_poll_secs
        ):
            poller = RepositoryPoller(self._sources, self)
            await poller.look()
            self._tasks.start(poller.run(settings.repository.repository_poll_secs))
        named = (
            settings.repository.model_control_mode == "explicit"
            and settings.repository.load_models != (ALL_MODELS,)
        )
        names = set(settings.repository.load_models) if named else set[str]()
        self.progress.expect(len(names))
        loads = [self._tasks.start(self._load_and_tell(name)) for name in sorted(names)]
        if named:
            # The repositories must exist, whatever is loaded.
            await self._sources.names()
        else:
            async for listing in self._sources.listings(
                may_be_empty=settings.repository.allow_empty_repository
                or not settings.repository.exit_on_error
            ):
                fresh = sorted(set(listing) - names)
                names.update(fresh)
                self.progress.expect(len(names))
                loads += [self._tasks.start(self._load_and_tell(name)) for name in fresh]
            if not names:
                _logger.warning(
                    "there is no model in %s: a model is a directory with its name there, which contains "
                    "its versions",
                    ", ".join(map(str, settings.repository.model_repositories)),
                )
        await asyncio.gather(*loads)
        self.progress.expect(0)

    async def close(self, seconds: float) -> None:
        """Drain and unload every model, then release the arenas."""
        self._closing = True
        await self._tasks.cancel()
        await self._loader.context.environments.close()
        await self.end(seconds)
        self._sources.close()
        self.metrics.close()
        self.regions.close()
        await self.devices.close()

    async def _load_and_tell(self, name: str) -> None:
        """Load an initial model; write a failure to the log and the index."""
        try:
            await self._load(name, self._sources.locate, initial=True)
        except NotPrepared as error:
            if not self._index.versions(name):
                self._index.set(name, 0, "UNAVAILABLE", error.reason)
            _logger.error("failed to load '%s': %s", name, error.reason)  # noqa: TRY400
        except LoadFailed:
            # The index and the log have the error of each version.
            return
        except BridgeError as error:
            self._index.set(name, 0, "UNAVAILABLE", error.message)
            _logger.error("failed to load '%s': %s", name, error.message)  # noqa: TRY400
        finally:
            self.list_reasons()

    # -- for clients and models ---------------------------------------------------------

    async def load(
        self,
        name: str,
        config: str | None = None,
        files: Mapping[str, bytes | memoryview] | None = None,
    ) -> None:
        """Load a model, or reload it if it has changed; return when it is served.

        The load continues if the caller is cancelled. A failed load leaves served versions running. An
        ensemble that its members do not allow is served as soon as they do.

        - ``config``: JSON that replaces the model's config.pbtxt.
        - ``files``: contents by ``file:<version>/<path>`` that replace the model's directory.

        Raises BridgeError: in Triton's words; UNAVAILABLE unless in explicit mode.
        """
        self.check_control()

        async def source(name: str) -> ModelSource:
            if not files:
                return replace(await self._sources.locate(name), config=config)
            was = self._served.get(name)
            before = None if was is None else was.prepared.source
            return await self.threads.run(
                f"writing the files of model '{name}'",
                lambda: self._sources.sent(name, config, files, before),
            )

        await self._shield(self._load(name, source))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model; return when it accepts no more requests; its last ones may still run.

        Unloading an unknown model is no error. Ensembles that require the model are unloaded, too,
        until it is loaded again.

        ``dependents``: also unload models that it requires, unless they were loaded explicitly or
        another loaded ensemble requires them.

        Raises BridgeError: UNAVAILABLE unless in explicit mode.
        """
        self.check_control()
        await self._shield(self.remove(name, dependents=dependents))

    def check_control(self) -> None:
        """Raise BridgeError, in Triton's words, unless in explicit mode and running."""
        if self._settings.repository.model_control_mode != "explicit":
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")
        if self._closing:
            raise _stopping()

    # -- loads and unloads ---------------------------------------------------------------------

    async def reload(self, name: str) -> None:
        """Load a model from its directory in any mode; raises BridgeError as :meth:`load`."""
        await self._load(name, self._sources.locate)

    async def withdraw(self, name: str) -> None:
        """Unload a model whose directory was removed, in any mode."""
        await self.remove(name)
        self._index.forget(name)
        self.list_reasons()

    async def remove(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model as :meth:`unload`, in any mode."""
        async with self._locks.change(name):
            was = self._served.get(name)
            self._index.keep_wanted(name)
            if was is not None:
                self.switch(name, None)
        if was is not None and dependents:
            await self._remove_unneeded(was.required)

    async def _remove_unneeded(self, names: Iterable[str]) -> None:
        """Unload models that were loaded only because ensembles required them, if none does now."""
        for name in sorted(names):
            async with self._locks.change(name):
                was = self._served.get(name)
                if was is None or was.asked or self.is_needed(name):
                    continue
                self._index.keep_wanted(name)
                self.switch(name, None)
            await self._remove_unneeded(was.required)

    async def _load(
        self,
        name: str,
        find_source: Callable[[str], Awaitable[ModelSource]],
        *,
        initial: bool = False,
        chain: tuple[str, ...] = (),
    ) -> None:
        """Load a model.

        - ``initial``: let some of its versions fail, and count an ensemble that is not served.
        - ``chain``: the ensembles that require it, which are being loaded.
        """
        try:
            await self._load_itself(name, find_source, initial=initial, chain=chain)
            # Outside its lock: a load that waits for a model must not block others.
            if self._unmet(name) is not None or not self._is_whole(name):
                await self._load_members(name, (*chain, name), wanted=initial)
        finally:
            # Reasons of ensembles may name a version that was loading.
            self.list_reasons()

    async def _load_itself(
        self,
        name: str,
        find_source: Callable[[str], Awaitable[ModelSource]],
        *,
        initial: bool,
        chain: tuple[str, ...],
    ) -> None:
        """Load a model as :meth:`_load`, without the members that an ensemble lacks."""
        async with self._locks.change(name):
            served = self._served.get(name)
            if chain and served is not None:
                if served.prepared.graph or self._is_whole(name):
                    return
                # What it was loaded as stays, whatever its files are by now.
                find_source = partial(_held, served.prepared.source)
            with self._index.loading(name):
                source = await find_source(name)
                try:
                    prepared = await self._prepare(name, source, served)
                    if prepared.graph is None:
                        await self._replace(name, prepared, partial=initial, asked=not chain)
                    else:
                        self._define(name, prepared, asked=not chain)
                finally:
                    source.release()

    def _is_whole(self, name: str) -> bool:
        """Return whether a model is served, and none of its processes waits to be started again."""
        models = self._versions(name).values()
        return bool(models) and all(model.whole for model in models)

    async def _prepare(
        self, name: str, source: ModelSource, served: Served | None
    ) -> PreparedModel:
        try:
            was = None if served is None else served.latest
            return await self._loader.prepare(name, source, was)
        except NotPrepared as error:
            if error.present is not None:
                self._index.keep_wanted(name, error.present)
            if isinstance(error, NoVersion):
                self._index.hide(name)
            raise
        except LoadFailed as error:
            self._index.keep_wanted(name, error.reasons)
            for version in error.reasons.keys() - self._versions(name).keys():
                self._index.set(name, version, "UNAVAILABLE", error.why(version))
            for version in sorted(error.reasons):
                reason = error.why(version)
                _logger.error("failed to load '%s' version %d: %s", name, version, reason)  # noqa: TRY400
            raise

    # -- ensembles -----------------------------------------------------------------------------

    def _define(self, name: str, prepared: PreparedModel, *, asked: bool) -> None:
        """Serve an ensemble on its members, now or as soon as they allow it."""
        was = self._served.get(name)
        if was is None or not was.models:
            asked = asked or (was is not None and was.asked)
            self.switch(name, Served(prepared, {}, asked=asked))
        else:
            self.switch(name, replace(was, waiting=prepared, asked=asked or was.asked))

    def _unmet(self, name: str) -> LoadError | None:
        """Return why an ensemble is not served as it was loaded last."""
        served = self._served.get(name)
        if served is None or served.latest.graph is None:
            return None
        try:
            self._on_members(name, served.latest)
        except LoadError as error:
            return error
        return None

    async def _load_members(self, name: str, chain: tuple[str, ...], *, wanted: bool) -> None:
        """Load the members of an ensemble that are missing, or wait for a restart.

        - ``chain``: the ensemble and those that require it.
        - ``wanted``: whether the server is not ready without it.

        Raises BridgeError: why it is not served, or why a member does not start.
        """
        served = self._served[name]
        rows = []
        if not served.models:
            rows = [
                self._index.load_again(name, version, wanted=wanted)
                for version in served.prepared.versions
            ]
        try:
            required = served.latest.required
            loads = [
                self._load(each, self._sources.locate, chain=chain)
                for each in sorted(required.difference(chain))
                if not self._is_whole(each)
            ]
            results = await asyncio.gather(*loads, return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            for result in errors:
                if not isinstance(result, BridgeError):
                    raise result
        finally:
            error = self._unmet(name)
            self._end_loading(rows, error)
        if error is None:
            if errors and not self._is_whole(name):
                raise errors[0]
            return
        if isinstance(error, LoadFailed):
            for version in error.reasons:
                _logger.error(
                    "failed to load '%s' version %d: %s", name, version, error.why(version)
                )
        raise error

    def _end_loading(self, rows: Sequence[VersionStatus], error: LoadError | None) -> None:
        """List why an ensemble is not served, in the rows that no other change has replaced."""
        for row in rows:
            if error is None:
                self._index.unloaded(row)
            elif self._index.versions(row.name).get(row.version) is row:
                wanted = row.wanted or isinstance(error, LoadFailed)
                reason = error.why(row.version)
                self._index.set(row.name, row.version, "UNAVAILABLE", reason, wanted=wanted)

    # -- models that stubs execute -------------------------------------------------------------

    async def _replace(
        self, name: str, prepared: PreparedModel, *, partial: bool, asked: bool
    ) -> None:
        """Load new and changed versions, and those that wait for a restart; serve them atomically."""
        was = self._served.get(name)
        if was is not None and was.waiting is not None:
            # What is loaded now takes the place of that, too.
            was = replace(was, waiting=None)
            self.switch(name, was)
        old = was.models if was is not None else {}
        kept = {
            version: model
            for version, model in old.items()
            if was is not None
            and version in prepared.versions
            and model.whole
            and prepared.same_version(was.prepared, version)
        }
        fresh = self._make(name, prepared, kept)
        for version in fresh.keys() - old.keys():
            self._index.set(name, version, "LOADING")
        try:
            reasons = await self._loader.load_versions(list(fresh.values()))
        except asyncio.CancelledError:
            for version in fresh.keys() - old.keys():
                self._index.set(name, version, "UNAVAILABLE", "the server is stopping")
            raise
        for version in reasons.keys() - old.keys():
            self._index.set(name, version, "UNAVAILABLE", reasons[version].message)
        up = {version: model for version, model in fresh.items() if version not in reasons}
        if not reasons or (partial and up):
            for model in kept.values():
                model.config = model.config.with_version_policy(prepared.config)
            sources = dict.fromkeys(up, prepared.source)
            sources |= {version: was.sources[version] for version in kept} if was else {}
            asked = asked or (was is not None and was.asked)
            self.switch(name, Served(prepared, {**kept, **up}, sources, asked))
        else:
            for version, model in up.items():
                row = None if version in old else self._index.set(name, version, "UNLOADING")
                self.retire(model, row, prepared.source)
        if reasons:
            raise LoadFailed(name, reasons)

    def _make(
        self, name: str, prepared: PreparedModel, kept: Container[int]
    ) -> dict[int, StubModel]:
        """Make the missing versions without starting them."""
        try:
            return {
                version: self._loader.model(prepared, version)
                for version in prepared.versions
                if version not in kept
            }
        except BridgeError as error:
            raise load_refused(name, error.message) from error

    async def listed(self) -> list[VersionStatus]:
        """Return the index; in explicit mode with the unloaded models of the repositories."""
        if self._settings.repository.model_control_mode == "explicit":
            return self._index.rows(await self._sources.names())
        return self.index()

    def _set_log_levels(self) -> None:
        for model in self.running():
            model.set_log_levels()

    async def _shield(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that continues if the caller is cancelled."""
        task = self._tasks.start(work)
        # Mark the exception as retrieved, as the caller may be cancelled by then.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _stopping() from None
            raise


async def _held(source: ModelSource, _: str) -> ModelSource:
    """Return a source for a load, which releases it."""
    source.hold()
    return source


def _stopping() -> BridgeError:
    return unavailable("the server is stopping")
