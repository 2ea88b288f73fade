"""One load of a model: from its directory, or what a client sent instead, to running versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpubridge.config import (
    Backends,
    ModelConfig,
    custom_config,
    finish_model_config,
    load_model_config,
    served_versions,
    unsupported_features,
)
from gpubridge.engine.context import EngineContext
from gpubridge.engine.ensemble.ensemble_model import EnsembleModel
from gpubridge.engine.ensemble.graph import is_ensemble
from gpubridge.engine.instance import InstanceState
from gpubridge.engine.model import Model, StubModel
from gpubridge.engine.model_files import ModelFiles, OverrideDirectory, read_model_files
from gpubridge.errors import BridgeError, ErrorCode, invalid, unsupported
from gpubridge.telemetry.logs import request_error

if TYPE_CHECKING:
    from gpubridge.engine.served_models import ServedModels

_logger = logging.getLogger(__name__)


async def report_progress(model: Model, every: float = 5.0) -> None:
    """Log a line every so many seconds, until cancelled."""
    clock = asyncio.get_running_loop().time
    begin = clock()
    while True:
        await asyncio.sleep(every)
        waiting = [i.name for i in model.instances if i.state is InstanceState.STARTING]
        if not waiting:
            continue
        word = "instance" if len(waiting) == 1 else "instances"
        where = "auto_complete_config" if model.config.draft else "initialize"
        _logger.info(
            "model '%s' version %d is loading for %.0f s: %s %s in %s",
            model.name,
            model.version,
            clock() - begin,
            word,
            ", ".join(waiting),
            where,
        )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Source of a model.

    - ``config``: JSON instead of the directory's config.pbtxt.
    - ``digest``: tells the files of one client from those of another; empty for a directory of the
      repository.
    - ``overrides``: the directory, if it was made of files that a client sent.
    """

    directory: Path
    config: str | None = None
    digest: str = ""
    overrides: OverrideDirectory | None = None

    def hold(self) -> None:
        """Need the directory, until :meth:`release`."""
        if self.overrides is not None:
            self.overrides.hold()

    def release(self) -> None:
        """Need the directory no more."""
        if self.overrides is not None:
            self.overrides.release()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be loaded.

    - ``versions``: those that the version policy chooses, ascending.
    - ``files``: the state of its files before any of them was read.
    """

    source: ModelSource
    config: ModelConfig
    versions: tuple[int, ...]
    files: ModelFiles

    def same_version(self, other: PreparedModel, version: int) -> bool:
        """Return whether a version is the same in both, so that it need not be loaded again."""
        return (
            self.source.directory == other.source.directory
            and self.files.shared == other.files.shared
            and self.files.versions.get(version) == other.files.versions.get(version)
            and _without_policy(self.config) == _without_policy(other.config)
        )


class NotPrepared(BridgeError):
    """A model is not there, or its configuration is none, or one that cannot be served.

    ``told``: what comes before the reason in the message: Triton's words.
    """

    def __init__(self, told: str, reason: str, code: ErrorCode) -> None:
        super().__init__(f"{told}: {reason}", code)
        self.reason = reason


class LoadFailed(BridgeError):
    """Some version of a model did not load.

    ``reasons``: why, by version.
    """

    def __init__(self, name: str, reasons: dict[int, BridgeError]) -> None:
        told = "".join(
            f"version {version} is at UNAVAILABLE state: {_code_name(error)}: {error.message};\n"
            for version, error in sorted(reasons.items())
        )
        super().__init__(f"load failed for model '{name}': {told}", ErrorCode.INVALID_ARG)
        self.reasons = reasons


class ModelLoader:
    """Reads, checks and starts models; holds none of them."""

    def __init__(
        self,
        context: EngineContext,
        gpu_count: Callable[[], int],
        gpu_fallback: Literal["none", "host"],
        backends: Backends,
        *,
        auto_complete: bool = True,
    ) -> None:
        self.context = context
        self._gpu_count = gpu_count
        self._gpu_fallback = gpu_fallback
        self._backends = backends
        self._auto_complete = auto_complete

    async def prepare(self, name: str, source: ModelSource) -> PreparedModel:
        """Read a model's configuration and choose its versions.

        Raises NotPrepared: INTERNAL when the configuration is none, INVALID_ARG when it cannot be
        served.
        """
        threads, read = self.context.threads, partial(self._read, name, source)
        try:
            prepared = await threads.run(f"reading the files of model '{name}'", read)
        except NotPrepared as error:
            if "KIND_GPU" in error.message:
                self.context.devices.tell_absence()
            raise
        except Exception as error:
            raise not_found(name, request_error(error, "load").message) from error
        if prepared.config.fallbacks:
            self.context.devices.tell_absence()
        for notice in prepared.config.notices:
            _logger.warning("%s", notice)
        return prepared

    def _read(self, name: str, source: ModelSource) -> PreparedModel:
        # Before anything is read: what changes from here on is another state of the files.
        files = read_model_files(source.directory)
        custom_name = self.context.settings.model_config_name
        try:
            # Counting GPUs, where it has to be done, takes long.
            config = load_model_config(
                source.directory,
                gpu_count=self._gpu_count,
                gpu_fallback=self._gpu_fallback,
                override=source.config or custom_config(source.directory, custom_name),
                backends=self._backends,
                draft=self._auto_complete,
            )
        except BridgeError as error:
            raise not_found(name, error.message) from error
        try:
            self._refuse_unsupported(config)
            self._refuse_many(config)
            versions = served_versions(source.directory, name, config.version_policy)
        except BridgeError as error:
            told = f"load failed for model '{name}'"
            raise NotPrepared(told, error.message, ErrorCode.INVALID_ARG) from error
        return PreparedModel(source, config, tuple(versions), files)

    def _refuse_many(self, config: ModelConfig) -> None:
        """Refuse more instances than a model may have: each is a process."""
        most = self.context.settings.max_model_instances
        count = sum(group.count * max(1, len(group.gpus)) for group in config.instance_groups)
        if count > most:
            raise invalid(
                f"model '{config.name}' asks for {count} instances: expected at most {most} "
                "(--max-model-instances)"
            )

    def model(self, prepared: PreparedModel, version: int, members: ServedModels) -> Model:
        """Make a version of a model; nothing of it runs yet. ``members`` has those it is made of."""
        if is_ensemble(prepared.config):
            return EnsembleModel(prepared.config, version, members, self.context)
        finish = partial(self._finish, prepared)
        return StubModel(prepared.config, version, prepared.source.directory, self.context, finish)

    def _finish(self, prepared: PreparedModel, returned: str | None) -> ModelConfig:
        """Return the whole configuration of a model that was asked to complete it."""
        directory = prepared.source.directory
        config = finish_model_config(
            prepared.config,
            returned,
            directory,
            gpu_count=self._gpu_count,
            backends=self._backends,
        )
        self._refuse_unsupported(config)
        return config

    def _refuse_unsupported(self, config: ModelConfig) -> None:
        limited = self.context.settings.triton.rate_limited
        refused = unsupported_features(config, rate_limited=limited)
        if refused:
            raise unsupported("; ".join(refused))

    async def bring_up(self, models: Sequence[Model]) -> dict[int, BridgeError]:
        """Load versions of a model, all at once; returns why those that failed did, by version.

        When it is cancelled, none of them is left.
        """
        try:
            results = await asyncio.gather(*(self._load(model) for model in models))
        except asyncio.CancelledError:
            await asyncio.gather(*(model.unload(0.0) for model in models))
            raise
        return {m.version: error for m, error in zip(models, results, strict=True) if error}

    async def _load(self, model: Model) -> BridgeError | None:
        _logger.info("loading: %s:%d", model.name, model.version)
        progress = asyncio.get_running_loop().create_task(report_progress(model))
        try:
            await model.load()
        except Exception as raised:  # noqa: BLE001  (one model's failure, whatever it is)
            error = request_error(raised, "load")
            _logger.error(  # noqa: TRY400  (the model's own traceback is in it)
                "failed to load '%s' version %d: %s", model.name, model.version, error.message
            )
            return error
        finally:
            progress.cancel()
        return None


def not_found(name: str, reason: str) -> NotPrepared:
    """Make the error for a model that is not there or cannot be read."""
    told = f"failed to load '{name}', failed to poll from model repository"
    return NotPrepared(told, reason, ErrorCode.INTERNAL)


def required_models(config: ModelConfig) -> list[str]:
    """Return the models that must be there for this one to work: the steps of an ensemble."""
    steps = config.message.ensemble_scheduling.step
    return sorted({step.model_name for step in steps})


def _without_policy(config: ModelConfig) -> bytes:
    message = type(config.message)()
    message.CopyFrom(config.message)
    message.ClearField("version_policy")
    text: bytes = message.SerializeToString(deterministic=True)
    return text


_CODE_NAMES = {
    ErrorCode.UNKNOWN: "Unknown",
    ErrorCode.INTERNAL: "Internal",
    ErrorCode.NOT_FOUND: "Not found",
    ErrorCode.INVALID_ARG: "Invalid argument",
    ErrorCode.UNAVAILABLE: "Unavailable",
    ErrorCode.UNSUPPORTED: "Unsupported",
    ErrorCode.ALREADY_EXISTS: "Already exists",
    ErrorCode.CANCELLED: "Cancelled",
}


def _code_name(error: BridgeError) -> str:
    return _CODE_NAMES[error.code]
