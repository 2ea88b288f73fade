"""Where models come from: the directories of the repository, and files that clients send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpubridge.engine.model_files import (
    FileOverrides,
    ModelFiles,
    files_digest,
    model_directories,
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
    """

    def __init__(self, directories: Sequence[Path], models: Sequence[Path] = ()) -> None:
        self._directories = directories
        self._models = models
        self._overrides = FileOverrides()

    def names(self) -> list[str]:
        """Return the names of the models in the directories; raises BridgeError."""
        names = {path.name for path in self._models}
        for directory in self._directories:
            try:
                names.update(path.name for path in model_directories(directory))
            except OSError as error:
                raise invalid(
                    f"failed to stat model repository {directory}: {error.strerror}"
                ) from error
        return sorted(names)

    def locate(self, name: str) -> ModelSource:
        """Find a model's directory; raises NotPrepared."""
        found = []
        if _is_file_name(name):
            candidates = [directory / name for directory in self._directories]
            candidates += [path for path in self._models if path.name == name]
            found = [path for path in candidates if path.is_dir()]
        if not found:
            raise not_found(name, "model not found in any model repository")
        if len(found) > 1:
            parents = " and ".join(str(path.parent) for path in found)
            reason = f"model is defined in both {parents}: every model must have one directory"
            raise not_found(name, reason)
        return ModelSource(found[0])

    def sent(
        self, name: str, config: str | None, files: Mapping[str, bytes], served: ModelSource | None
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
        if not _is_file_name(name):
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

    def read(self) -> _Files:
        """Look at the files of every model; raises OSError while a repository cannot be listed."""
        found: _Files = {}
        paths = [path for each in self._directories for path in model_directories(each)]
        for path in (*paths, *(path for path in self._models if path.is_dir())):
            found.setdefault(path.name, []).append(read_model_files(path))
        return found

    def close(self) -> None:
        """Remove the files that clients sent; idempotent."""
        self._overrides.close()


def _is_file_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


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
            found = await asyncio.to_thread(self._sources.read)
        except OSError as error:
            # Not as if all of its models were deleted: it may be mounted again in a moment.
            if self._unreadable != str(error):
                self._unreadable = str(error)
                _logger.error("failed to poll model repository: %s", error)  # noqa: TRY400
            return None
        self._unreadable = ""
        return found
