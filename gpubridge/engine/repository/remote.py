"""Model repositories in object storage, by fsspec."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpubridge.config.remote_url import EXTRAS, RemoteUrl, storage_options
from gpubridge.config.settings import RepositorySettings
from gpubridge.engine.cache_directory import open_cache
from gpubridge.engine.load_progress import readable_size
from gpubridge.engine.repository.model_cache import (
    CachedModel,
    check_space,
    finish_file,
    make_parents,
    repository_folder,
)
from gpubridge.engine.repository.model_files import (
    IGNORED_FOLDER,
    FileStates,
    HeldDirectory,
    is_model_entry,
)
from gpubridge.engine.repository.s3_session import session_class
from gpubridge.errors import BridgeError, counted, invalid, unavailable

_MODULES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_MOUNTS = {"s3": "AWS", "gs": "GCS", "az": "AZURE"}
"""Of Triton's variables for the directory of local copies, TRITON_*_MOUNT_DIRECTORY."""

_CHECKSUMS = ("ETag", "md5Hash", "etag", "generation", "last_modified", "mtime", "created")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_FILES_AT_ONCE = 16
_MODELS_AT_ONCE = 8
_ATTEMPTS = 3

_logger = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called in the downloading thread with the bytes so far and the bytes of all."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model in a remote repository; ``states``: of its files, with checksums as times."""

    repository: RemoteRepository
    name: str
    states: FileStates

    @property
    def parent(self) -> RemoteUrl:
        """The URL of the repository."""
        return self.repository.url


class RemoteRepository:
    """Lists and downloads the models of a remote repository; its methods block.

    - ``system``: makes the file system of fsspec, in the thread that needs it first.
    - ``slots``: of concurrent downloads.
    """

    def __init__(
        self, url: RemoteUrl, settings: RepositorySettings, system: Callable[[], Any]
    ) -> None:
        self.url = url
        self.slots = asyncio.Semaphore(_MODELS_AT_ONCE)
        self._settings = settings
        self._make_system = system
        self._making = threading.Lock()
        self._made: Any = None
        self._stopped = threading.Event()
        self._listed: list[RemoteModel] = []
        self._trouble = ""

    def models(self, *, required: bool) -> list[RemoteModel]:
        """List the models; those of the last time while the repository cannot be listed.

        Raises BridgeError: the repository cannot be listed and never was, if ``required``.
        """
        try:
            found = self._scan(self.url.path)
        except BridgeError as error:
            if required and not self._listed:
                raise
            if error.message != self._trouble:
                self._trouble = error.message
                _logger.error("%s", error.message)  # noqa: TRY400  (the traceback does not help)
            return self._listed
        self._trouble = ""
        self._listed = [
            RemoteModel(self, name, tuple(sorted(states)))
            for name, states in sorted(found.items())
            if is_model_entry(name)
        ]
        return self._listed

    def find(self, name: str) -> RemoteModel | None:
        """Look for a model; raises BridgeError."""
        states = self._scan(f"{self.url.path}/{name}").get(name)
        return None if states is None else RemoteModel(self, name, tuple(sorted(states)))

    def download(self, model: RemoteModel, report: Report) -> HeldDirectory:
        """Return a snapshot of a model's files, after downloading those that are not cached.

        Raises BridgeError: nothing is cached of what could not be downloaded whole.
        """
        what = f"{self}/{model.name}"
        try:
            cached = CachedModel(self._cache, model.name)
            with cached.locked(self._wait):
                for _ in range(_ATTEMPTS):
                    self._check(what, model.states)
                    found = cached.find(model.states)
                    if found is not None:
                        return found
                    with cached.begin() as directory:
                        missing = cached.link(directory, model.states)
                        self._get(model.name, directory, missing, report)
                        now = self.find(model.name)
                        if now == model:
                            return cached.complete(directory, model.states)
                    if now is None:
                        raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile")
                    model = now
        except BridgeError:
            raise
        except Exception as error:
            raise self._error(what, error) from error
        raise unavailable(f"{what} changes while it is downloaded: write it whole, then load it")

    def __str__(self) -> str:
        return self.url.text

    def close(self) -> None:
        """Let downloads end soon, with an error."""
        self._stopped.set()

    # -- the file system -----------------------------------------------------------------------

    @cached_property
    def _cache(self) -> Path:
        mount = os.environ.get(f"TRITON_{_MOUNTS.get(self.url.protocol)}_MOUNT_DIRECTORY")
        configured = self._settings.model_cache_dir or (Path(mount) if mount else None)
        purpose = "remote models cannot be kept in"
        cache = open_cache("models", configured, purpose, "--model-cache-dir")
        return cache / repository_folder(self.url.text)

    @property
    def _system(self) -> Any:
        with self._making:
            if self._made is None:
                self._made = self._make_system()
            return self._made

    def _scan(self, folder: str) -> dict[str, list[tuple[str, int, int]]]:
        """Return the states of all files in a folder of the repository, by model."""
        found: dict[str, list[tuple[str, int, int]]] = {}
        try:
            self._system.invalidate_cache()
            files: Mapping[str, Mapping[str, Any]] = self._system.find(folder, detail=True)
        except BridgeError:
            raise
        except Exception as error:
            raise self._error(str(self.url), error) from error
        for key, info in files.items():
            name, _, path = key.lstrip("/").removeprefix(f"{self.url.path}/").partition("/")
            # Keys that end with a slash are made by tools that show folders.
            if path and not key.endswith("/") and IGNORED_FOLDER not in path.split("/"):
                state = (path, _checksum(info), int(info.get("size") or 0))
                found.setdefault(name, []).append(state)
        return found

    def _check(self, what: str, states: FileStates) -> None:
        """Refuse keys that are no paths of files in a directory, and too many bytes."""
        paths = {path for path, *_ in states}
        for path in paths:
            parts = path.split("/")
            if {"", ".", ".."}.intersection(parts) or "\0" in path:
                raise invalid(f"{what} has the key {path!a}: expected the path of a file in it")
            for end in range(1, len(parts)):
                if "/".join(parts[:end]) in paths:
                    folder = "/".join(parts[:end])
                    raise invalid(
                        f"{what}: the key {folder!a} is a file, and the folder of {path!a}"
                    )
        nbytes, most = sum(state[2] for state in states), self._settings.remote_model_limit
        if nbytes > most:
            raise invalid(
                f"{what} has {nbytes} bytes: expected at most {most} (--remote-model-limit)"
            )

    def _get(self, name: str, directory: Path, states: FileStates, report: Report) -> None:
        """Download files into a directory."""
        callbacks = importlib.import_module("fsspec.callbacks")
        total, done = sum(state[2] for state in states), 0
        check_space(directory, total)
        _logger.info(
            "downloading %s/%s: %s, %s",
            self,
            name,
            counted(len(states), "file"),
            readable_size(total),
        )
        for first in range(0, len(states), _FILES_AT_ONCE):
            part = states[first : first + _FILES_AT_ONCE]
            for path, *_ in part:
                make_parents(directory, path)
            limit = sum(state[2] for state in part)

            def advance(nbytes: int, done: int = done) -> None:
                report(done + nbytes, total)

            progress = self._callback(callbacks.Callback, limit, advance)
            keys = [f"{self.url.path}/{name}/{path}" for path, *_ in part]
            self._system.get(keys, [str(directory / path) for path, *_ in part], callback=progress)
            for path, checksum, nbytes in part:
                got = (directory / path).stat().st_size
                if got != nbytes:
                    raise OSError(f"expected {nbytes} bytes of {path}, got {got}")
                finish_file(directory / path, checksum)
            done += limit

    def _callback(self, base: Any, limit: int, report: Callable[[int], None]) -> Any:
        """Make fsspec's callback for some files, which reports, limits and stops their download."""
        wait, files = self._wait, []

        class Progress(base):  # type: ignore[misc]
            """Progress of one file, or the parent of those; ``value`` is its bytes."""

            def branched(self, *_: Any, **__: Any) -> Any:
                files.append(Progress())
                return files[-1]

            def call(self, *_: Any, **__: Any) -> None:
                wait(0)
                nbytes = sum(file.value for file in files)
                if nbytes > limit:
                    raise OSError(f"got more than the {limit} bytes that were listed")
                report(nbytes)

        return Progress()

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise unavailable("the server is stopping")

    def _error(self, what: str, error: Exception) -> BridgeError:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and (error.errno in _DISK_ERRORS or self._is_local(error)):
            why = f"the cache cannot be written: {error}; free it, or choose another directory with --model-cache-dir"  # fmt: skip
        elif isinstance(error, FileNotFoundError):
            why = f"there is no such bucket or key ({text}): check the URL, and the server it names"
        elif isinstance(error, PermissionError) or "redentials" in text:
            why = (
                f"access is denied ({text}): check the credentials in the environment or "
                "TRITON_CLOUD_CREDENTIAL_PATH, and their right to list and read"
            )
        else:
            why = f"{text}; check the URL and the network"
        return unavailable(f"{what} cannot be read: {why}")

    def _is_local(self, error: OSError) -> bool:
        cache = self.__dict__.get("_cache")
        return cache is not None and str(error.filename or "").startswith(str(cache))


def open_repositories(settings: RepositorySettings) -> list[Path | RemoteRepository]:
    """Return the repositories of the settings; raises BridgeError where a package is absent."""
    return [
        each if isinstance(each, Path) else RemoteRepository(each, settings, _system_of(each))
        for each in settings.model_repositories
    ]


def _system_of(url: RemoteUrl) -> Callable[[], Any]:
    module = _MODULES[url.protocol]
    if importlib.util.find_spec(module) is None:
        raise unavailable(
            f"{url} needs the package {module}: pip install 'gpubridge[{EXTRAS[url.protocol]}]'"
        )

    def make() -> Any:
        options = storage_options(url, os.environ)
        if url.protocol == "s3":
            options["config_kwargs"]["http_session_cls"] = session_class()
        fsspec = importlib.import_module("fsspec")
        cacheless = {"skip_instance_cache": True, "use_listings_cache": False}
        return fsspec.filesystem(url.protocol, **cacheless, **options)

    return make


def _checksum(info: Mapping[str, Any]) -> int:
    """Return a time in nanoseconds, after 2001, that stands for the content of a file."""
    value = next((info[name] for name in _CHECKSUMS if info.get(name)), "")
    digest = hashlib.sha256(str(value).encode()).digest()
    return 10**18 + (int.from_bytes(digest[:8], "big") >> 5)
