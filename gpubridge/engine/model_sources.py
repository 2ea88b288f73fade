"""Sources of models: the directories of the repository, and files that clients send."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpubridge.engine.load_threads import ANSWER_SECONDS, LatestAnswers, LoadThreads
from gpubridge.engine.model_files import (
    FileOverrides,
    ModelFiles,
    files_digest,
    is_model_name,
    list_repository,
    read_model_files,
)
from gpubridge.engine.model_loader import LoadFailed, ModelSource, not_found
from gpubridge.errors import BridgeError, invalid

if TYPE_CHECKING:
    from gpubridge.engine.repository import ModelRepository

_logger = logging.getLogger(__name__)

_Files = dict[str, list[ModelFiles]]


class ModelSources:
    """Finds models by name; owns the files that clients sent.

    - ``directories``: repositories.
    - ``models``: directories of single models.

    One that does not answer, as on a dead mount, holds up nothing but what is in it.
    """

    def __init__(
        self, threads: LoadThreads, directories: Sequence[Path], models: Sequence[Path] = ()
    ) -> None:
        self._threads = threads
        self._directories = directories
        self._models = models
        self._overrides = FileOverrides()
        # A listing waits for the links in it.
        self._links = {
            path: LatestAnswers(self._is_directory, ANSWER_SECONDS / 2) for path in directories
        }
        self._listings = LatestAnswers(self._list)
        self._states = LatestAnswers(self._look)

    async def listings(self) -> AsyncIterator[list[str]]:
        """Yield the names in each repository, once that answers; raises BridgeError."""
        yield [path.name for path in self._models]
        for listing in asyncio.as_completed([self._list(path) for path in self._directories]):
            yield [path.name for path in await listing]

    async def names(self) -> list[str]:
        """Return the names of the models in the directories that answer; raises BridgeError."""
        names = {path.name for path in self._models}
        for listing in (await self._listings.get(self._directories)).values():
            names.update(path.name for path in listing.result())
        return sorted(names)

    async def locate(self, name: str) -> ModelSource:
        """Find a model's directory; raises NotPrepared."""
        found: list[Path] = []
        if is_model_name(name):
            candidates = [directory / name for directory in self._directories]
            candidates += [path for path in self._models if path.name == name]
            found = await self._existing(candidates)
        if not found:
            raise not_found(name, "model not found in any model repository")
        if len(found) > 1:
            parents = " and ".join(str(path.parent) for path in found)
            reason = f"model is defined in both {parents}: every model must have one directory"
            raise not_found(name, reason)
        return ModelSource(found[0])

    async def _existing(self, candidates: Sequence[Path]) -> list[Path]:
        """Return those that are directories; where one is, the others have little time to answer."""
        looks = {asyncio.ensure_future(self._is_directory(path)): path for path in candidates}
        pending = set(looks)
        found: list[Path] = []
        try:
            while pending and not found:
                done, pending = await asyncio.wait(pending, timeout=ANSWER_SECONDS)
                found = [looks[look] for look in done if look.result()]
        finally:
            for look in pending:
                look.cancel()
        return found

    def sent(
        self,
        name: str,
        config: str | None,
        files: Mapping[str, bytes | memoryview],
        served: ModelSource | None,
    ) -> ModelSource:
        """Make a model's directory of files that a client sent; the caller releases the source.

        - ``files``: contents by ``file:<version>/<path>``.
        - ``served``: where the model that is served comes from; its directory is taken if its files
          are these.

        Raises NotPrepared when there is no configuration with them, or they cannot be written.
        """
        if config is None:
            reason = "Load parameter 'config' must be specified for model file override"
            raise not_found(name, reason)
        if not is_model_name(name):
            raise not_found(name, "expected a name that a directory can have")
        digest = files_digest(files)
        if served is not None and served.overrides is not None and served.digest == digest:
            served.overrides.hold()
            return ModelSource(served.directory, config, digest, served.overrides)
        try:
            overrides = self._overrides.write(name, files)
        except BridgeError as error:
            raise not_found(name, error.message) from error
        return ModelSource(overrides.model, config, digest, overrides)

    async def read(self) -> _Files:
        """Look at the files of every model; raises BridgeError while a repository cannot be listed.

        What does not answer is as it was.
        """
        listings = (await self._listings.get(self._directories)).values()
        paths = [path for listing in listings for path in listing.result()]
        paths += self._models
        found: _Files = {}
        for path, look in (await self._states.get(paths)).items():
            state = look.result()
            if state is not None:
                found.setdefault(path.name, []).append(state)
        return found

    async def _list(self, directory: Path) -> list[Path]:
        """Return the directories in a repository; what may be one but does not answer, too."""
        what = f"listing the model repository {directory}"
        try:
            entries = await self._threads.run(what, partial(list_repository, directory))
        except OSError as error:
            raise invalid(
                f"failed to stat model repository {directory}: {error.strerror}"
            ) from error
        links = [path for path, is_link in entries.items() if is_link]
        files = {
            path
            for path, answer in (await self._links[directory].get(links)).items()
            if not answer.result()
        }
        return [path for path in entries if path not in files]

    async def _is_directory(self, path: Path) -> bool:
        return await self._threads.run(f"looking for {path}", partial(os.path.isdir, path))

    async def _look(self, model: Path) -> ModelFiles | None:
        return await self._threads.run(f"looking at the files of {model}", partial(_state, model))

    def close(self) -> None:
        """Remove the files that clients sent; idempotent."""
        self._overrides.close()


def _state(model: Path) -> ModelFiles | None:
    return read_model_files(model) if model.is_dir() else None


class RepositoryPoller:
    """Looks at the files of all models again and again, and says what has changed.

    A model that does not load is tried again when its files have changed, not before.
    """

    def __init__(self, sources: ModelSources, holder: ModelRepository) -> None:
        self._sources = sources
        self._holder = holder
        self._seen: _Files = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._unreadable = ""

    async def look(self) -> None:
        """Take the files as they are for known: their models are loaded by somebody else."""
        self._seen = await self._look() or {}

    async def run(self, seconds: float) -> None:
        """Poll every so many seconds, until cancelled."""
        try:
            while True:
                await asyncio.sleep(seconds)
                await self.poll()
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def poll(self) -> None:
        """Look once, and begin to load and unload what has changed; a slow model holds up no other."""
        found = await self._look()
        if found is None:
            return
        for name in sorted(found.keys() | self._seen.keys()):
            if name in self._working or found.get(name) == self._seen.get(name):
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
            _logger.info("model '%s' is gone from the repository: unloading it", name)
            await self._holder.withdraw(name)
            return
        _logger.info("model '%s' is new or has changed: loading it", name)
        try:
            await self._holder.reload(name)
        except LoadFailed:
            # Each version's reason is in the log.
            return
        except BridgeError as error:
            _logger.error("%s", error.message)  # noqa: TRY400  (where it was raised tells nothing)

    def _done(self, name: str, _: asyncio.Task[None]) -> None:
        del self._working[name]

    async def _look(self) -> _Files | None:
        """Return the files of every model; None while a repository cannot be listed."""
        try:
            found = await self._sources.read()
        except BridgeError as error:
            # Not as if all of its models were deleted: it may be mounted again in a moment.
            if self._unreadable != error.message:
                self._unreadable = error.message
                _logger.error("failed to poll model repository: %s", error.message)  # noqa: TRY400
            return None
        self._unreadable = ""
        return found
