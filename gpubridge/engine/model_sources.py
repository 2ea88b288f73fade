"""Where models come from: the directories of the repository, and files that clients send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gpubridge.engine.file_overrides import FileOverrides, files_digest
from gpubridge.engine.model_files import model_directories
from gpubridge.engine.model_loader import ModelSource, not_found
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["ModelSources"]


class ModelSources:
    """Finds models by name; owns the files that clients sent.

    Parameters
    ----------
    directories : sequence of Path
        Each holds one directory per model.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = directories
        self._overrides = FileOverrides()

    def names(self) -> list[str]:
        """Return the names of the models in the directories.

        Raises
        ------
        BridgeError
            INVALID_ARG when a directory cannot be listed.
        """
        names: set[str] = set()
        for directory in self._directories:
            try:
                names.update(path.name for path in model_directories(directory))
            except OSError as error:
                raise BridgeError(
                    f"failed to stat model repository {directory}: {error.strerror}",
                    ErrorCode.INVALID_ARG,
                ) from error
        return sorted(names)

    def locate(self, name: str) -> ModelSource:
        """Find a model's directory.

        Raises
        ------
        NotPrepared
            When there is none, or more than one.
        """
        found = []
        if _is_file_name(name):
            found = [d / name for d in self._directories if (d / name).is_dir()]
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

        Parameters
        ----------
        files : mapping of str to bytes
            Contents by ``file:<version>/<path>``.
        served : ModelSource or None
            Where the model that is served comes from; its directory is taken if its files are these.

        Raises
        ------
        NotPrepared
            When there is no configuration with them, or they cannot be written.
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

    def close(self) -> None:
        """Remove the files that clients sent; idempotent."""
        self._overrides.close()


def _is_file_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")
