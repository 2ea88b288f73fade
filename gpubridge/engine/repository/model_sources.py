"""Sources of models: repositories and files that clients send; polling for changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from gpubridge.config.files import similar_path
from gpubridge.engine.load_progress import LoadProgress, readable_size
from gpubridge.engine.load_threads import ANSWER_SECONDS, LatestAnswers, LoadThreads
from gpubridge.engine.repository.loader import LoadFailed, ModelSource, NotPrepared, not_polled
from gpubridge.engine.repository.model_files import (
    FileOverrides,
    FileStates,
    HeldDirectory,
    ModelFiles,
    files_digest,
    is_model_name,
    list_repository,
    read_model_files,
)
from gpubridge.engine.repository.remote import RemoteModel, RemoteRepository
from gpubridge.engine.workers import repeat
from gpubridge.errors import BridgeError, ErrorCode, invalid
from gpubridge.telemetry.logs import request_error

_logger = logging.getLogger(__name__)

_Files = dict[str, list[ModelFiles | FileStates]]
_Repository = Path | RemoteRepository
_Location = Path | RemoteModel


class ModelSources:
    """Finds models by name; owns the files that clients sent.

    - ``repositories``: directories and remote ones.
    - ``models``: directories of single models.
    - ``progress``: gets that of downloads.
    - ``required``: whether a remote repository that cannot be listed is an error.

    Attribute ``unread``: remote models that could not be read, and may be later though they have not
    changed. A repository that does not respond, as on a dead mount, delays only its own models.
    """

    def __init__(
        self,
        threads: LoadThreads,
        repositories: Sequence[_Repository],
        models: Sequence[Path] = (),
        progress: LoadProgress | None = None,
        *,
        required: bool = True,
    ) -> None:
        self._threads = threads
        self._repositories = repositories
        self._models = models
        self._progress = progress or LoadProgress()
        self._required = required
        self.unread: set[str] = set()
        self._overrides = FileOverrides()
        # Half the time, as a listing waits for the links in it.
        self._links = {
            path: LatestAnswers(self._find_directory, ANSWER_SECONDS / 2) for path in repositories
        }
        self._listings = LatestAnswers(self._list)
        self._states = LatestAnswers(self._look)

    async def listings(self, *, may_be_empty: bool) -> AsyncIterator[list[str]]:
        """Yield the names of the models in each repository once it responds.

        Raises BridgeError; also, unless ``may_be_empty``, for a repository without models, which remote ones
        do not tell from a prefix that does not exist.
        """
        yield [path.name for path in self._models]
        for listing in asyncio.as_completed([self._named(each) for each in self._repositories]):
            repository, names = await listing
            if not names and not may_be_empty:
                raise invalid(
                    f"there is no model in {repository}: a model is a directory with its name there, which "
                    f"contains its versions{_of_version(repository)}; --allow-empty-repository=true starts "
                    "without"
                )
            yield names

    async def _named(self, repository: _Repository) -> tuple[_Repository, list[str]]:
        return repository, [path.name for path in await self._list(repository)]

    async def names(self) -> list[str]:
        """Return the names of the models in responding repositories; raises BridgeError."""
        names = {path.name for path in self._models}
        for listing in (await self._listings.get(self._repositories)).values():
            names.update(path.name for path in listing.result())
        return sorted(names)

    async def locate(self, name: str) -> ModelSource:
        """Find a model and download it if it is remote; the caller releases the source.

        Raises NotPrepared.
        """
        self.unread.discard(name)
        try:
            return await self._locate(name)
        except NotPrepared:
            raise
        except BridgeError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                self.unread.add(name)
            raise not_polled(name, error.message) from error

    async def _locate(self, name: str) -> ModelSource:
        found = await self._existing(name) if is_model_name(name) else []
        if not found:
            raise not_polled(name, "model not found in any model repository", ErrorCode.NOT_FOUND)
        if len(found) > 1:
            parents = " and ".join(str(path.parent) for path in found)
            reason = f"model is defined in both {parents}: every model must have one directory"
            raise not_polled(name, reason)
        model = found[0]
        if isinstance(model, Path):
            return ModelSource(model)
        snapshot = await self._download(model)
        return ModelSource(snapshot.model, held=snapshot, remote=f"{model.parent}/{name}")

    async def _existing(self, name: str) -> list[_Location]:
        """Return where a model is; once it is found, do not wait for other repositories.

        Raises BridgeError: it was not found, and a remote repository could not be read.
        """
        finds = [self._find(repository, name) for repository in self._repositories]
        finds += [self._find_directory(path) for path in self._models if path.name == name]
        looks = [asyncio.ensure_future(find) for find in finds]
        pending = set(looks)
        found: list[_Location] = []
        try:
            while pending and not found:
                _, pending = await asyncio.wait(pending, timeout=ANSWER_SECONDS)
                done = [look for look in looks if look.done()]
                found = [at for look in done if not look.exception() and (at := look.result())]
        finally:
            for look in pending:
                look.cancel()
        return found or [at for look in looks if (at := look.result())]

    async def _download(self, model: RemoteModel) -> HeldDirectory:
        what, amount = f"downloading {model.parent}/{model.name}", [0, 0]

        def report(done: int, total: int) -> None:
            amount[:] = done, total

        def step() -> tuple[str, float | None]:
            done, total = amount
            if not total:
                return what, None
            return f"{what}: {readable_size(done)} of {readable_size(total)}", done / total

        with self._progress.track(model.name, 0, step):
            async with model.repository.slots:
                download = partial(model.repository.download, model, report)
                return await self._threads.run(what, download, log_slow=False)

    def sent(
        self,
        name: str,
        config: str | None,
        files: Mapping[str, bytes | memoryview],
        served: ModelSource | None,
    ) -> ModelSource:
        """Write files that a client sent to a directory; the caller releases the source.

        - ``files``: contents by ``file:<version>/<path>``.
        - ``served``: source of the served model; its directory is reused if it has the same files.

        Raises NotPrepared without a configuration, or when the files cannot be written.
        """
        if config is None:
            reason = "Load parameter 'config' must be specified for model file override"
            raise not_polled(name, reason, ErrorCode.INVALID_ARG)
        if not is_model_name(name):
            raise not_polled(name, "expected a valid directory name", ErrorCode.INVALID_ARG)
        digest = files_digest(files)
        if served is not None and served.digest == digest:
            served.hold()
            return replace(served, config=config)
        try:
            overrides = self._overrides.write(name, files)
        except BridgeError as error:
            raise not_polled(name, error.message, error.code) from error
        return ModelSource(overrides.model, config, digest, overrides)

    async def read(self) -> _Files:
        """Return the state of the files of every model; raises BridgeError if a listing fails.

        Directories that do not respond keep their previous state.
        """
        listings = (await self._listings.get(self._repositories)).values()
        locations = [each for listing in listings for each in listing.result()]
        found: _Files = {}
        for model in locations:
            if isinstance(model, RemoteModel):
                found.setdefault(model.name, []).append(model.states)
        paths = [each for each in locations if isinstance(each, Path)]
        for path, look in (await self._states.get([*paths, *self._models])).items():
            state = look.result()
            if state is not None:
                found.setdefault(path.name, []).append(state)
        return found

    async def _list(self, repository: _Repository) -> Sequence[_Location]:
        """Return the models in a repository, including links that do not respond."""
        what = f"listing the model repository {repository}"
        if isinstance(repository, RemoteRepository):
            return await self._threads.run(
                what, partial(repository.models, required=self._required)
            )
        try:
            entries = await self._threads.run(what, partial(list_repository, repository))
        except OSError as error:
            likely = similar_path(repository) if isinstance(error, FileNotFoundError) else ""
            raise invalid(
                f"failed to stat model repository {repository}: {error.strerror}{likely}"
            ) from error
        links = [path for path, is_link in entries.items() if is_link]
        answers = await self._links[repository].get(links)
        files = {path for path, answer in answers.items() if answer.result() is None}
        return [path for path in entries if path not in files]

    async def _find(self, repository: _Repository, name: str) -> _Location | None:
        if isinstance(repository, Path):
            return await self._find_directory(repository / name)
        what = f"looking for {repository}/{name}"
        return await self._threads.run(what, partial(repository.find, name))

    async def _find_directory(self, path: Path) -> Path | None:
        is_there = await self._threads.run(f"looking for {path}", partial(os.path.isdir, path))
        return path if is_there else None

    async def _look(self, model: Path) -> ModelFiles | None:
        return await self._threads.run(f"looking at the files of {model}", partial(_state, model))

    def close(self) -> None:
        """Remove the files that clients sent, and stop downloads; idempotent."""
        self._overrides.close()
        for repository in self._repositories:
            if isinstance(repository, RemoteRepository):
                repository.close()


def _of_version(repository: _Repository) -> str:
    """Return what to serve in place of a directory that is a version of a model."""
    if not isinstance(repository, Path) or not (repository / "model.py").is_file():
        return ""
    return f", and this has a model.py: serve {repository.parent}"


def _state(model: Path) -> ModelFiles | None:
    return read_model_files(model) if model.is_dir() else None


class ReloadedModels(Protocol):
    """The models that a poller loads and unloads."""

    async def reload(self, name: str) -> None:
        """Load a model from its directory; raises BridgeError."""

    async def withdraw(self, name: str) -> None:
        """Unload a model whose directory was removed."""


class RepositoryPoller:
    """Polls the files of all models, and loads and unloads models that changed.

    A model that failed to load is tried again only when its files change, or could not be read.
    """

    def __init__(self, sources: ModelSources, repository: ReloadedModels) -> None:
        self._sources = sources
        self._repository = repository
        self._seen: _Files = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._unreadable = ""

    async def look(self) -> None:
        """Record the current files without loading their models."""
        self._seen = await self._look() or {}

    async def run(self, seconds: float) -> None:
        """Poll every ``seconds``, until cancelled."""
        try:
            await repeat("poll of the repositories", seconds, self.poll)
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def poll(self) -> None:
        """Poll once, and start loading and unloading changed models concurrently."""
        found = await self._look()
        if found is None:
            return
        for name in sorted(found.keys() | self._seen.keys()):
            is_known = found.get(name) == self._seen.get(name) and name not in self._sources.unread
            if name in self._working or is_known:
                continue
            if name in found:
                self._seen[name] = found[name]
            else:
                del self._seen[name]
            task = asyncio.get_running_loop().create_task(self._apply(name, name in found))
            self._working[name] = task
            task.add_done_callback(partial(self._done, name))

    async def _apply(self, name: str, is_there: bool) -> None:
        if not is_there:
            _logger.info("model '%s' was removed from the repository: unloading it", name)
            await self._repository.withdraw(name)
            return
        _logger.info("model '%s' is new or has changed: loading it", name)
        try:
            await self._repository.reload(name)
        except LoadFailed:
            # The error of each version is in the log.
            return
        except Exception as error:  # noqa: BLE001  (a bug of ours concerns this model)
            told = request_error(error, f"load of model '{name}'")
            _logger.error("%s", told.message)  # noqa: TRY400  (the traceback does not help)

    def _done(self, name: str, _: asyncio.Task[None]) -> None:
        del self._working[name]

    async def _look(self) -> _Files | None:
        """Return the files of every model; None while a repository cannot be listed."""
        try:
            found = await self._sources.read()
        except BridgeError as error:
            # Keep its models: the repository may be mounted again soon.
            if self._unreadable != error.message:
                self._unreadable = error.message
                _logger.error("failed to poll model repository: %s", error.message)  # noqa: TRY400
            return None
        self._unreadable = ""
        return found
