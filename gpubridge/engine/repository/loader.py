"""Loading of a model: from its directory or the files of a client to running versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from gpubridge.config import (
    Backends,
    ModelConfig,
    NotServable,
    VersionPolicy,
    custom_config,
    finish_model_config,
    load_model_config,
    served_versions,
    unsupported_features,
)
from gpubridge.engine.ensemble.ensemble_model import EnsembleModel
from gpubridge.engine.ensemble.graph import EnsembleGraph, draw_graph, is_ensemble
from gpubridge.engine.models.model import Model, StubModel
from gpubridge.engine.repository.model_files import HeldDirectory, ModelFiles, read_model_files
from gpubridge.engine.repository.one_file import renew
from gpubridge.engine.supervisor.context import EngineContext
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.errors import BridgeError, ErrorCode, invalid, unsupported
from gpubridge.telemetry.logs import request_error

_logger = logging.getLogger(__name__)


def starting_step(model: Model) -> tuple[str, float | None]:
    """Return what a load waits for: the instances that are starting."""
    waiting = [each.name for each in model.instances if each.state is InstanceState.STARTING]
    if not waiting:
        return "making its processes", None
    word = "instance" if len(waiting) == 1 else "instances"
    where = "auto_complete_config" if model.config.draft else "initialize"
    part = 1 - len(waiting) / len(model.instances) if len(model.instances) > 1 else None
    return f"{word} {', '.join(waiting)} in {where}", part


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Source of a model.

    - ``config``: JSON that replaces the directory's config.pbtxt.
    - ``digest``: hash of the files that a client sent; empty for a directory of the repository.
    - ``held``: the directory, if it has files that a client sent, or those of a remote model.
    - ``remote``: URL of a remote model.
    """

    directory: Path
    config: str | None = None
    digest: str = ""
    held: HeldDirectory | None = None
    remote: str = ""

    @property
    def origin(self) -> str:
        """The directory or URL that the model's files come from, whatever their state."""
        return self.remote or str(self.directory)

    def hold(self) -> None:
        """Keep the directory until :meth:`release`."""
        if self.held is not None:
            self.held.hold()

    def release(self) -> None:
        """Release the directory."""
        if self.held is not None:
            self.held.release()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is ready to be loaded.

    - ``versions``: the versions chosen by the version policy, ascending.
    - ``files``: the state of its files before any was read.
    - ``graph``: the steps of an ensemble; None for a model that stubs execute.
    """

    source: ModelSource
    config: ModelConfig
    versions: tuple[int, ...]
    files: ModelFiles
    graph: EnsembleGraph | None = None

    @property
    def required(self) -> frozenset[str]:
        """Return the models that an ensemble requires: those of its steps."""
        return frozenset(() if self.graph is None else (s.model for s in self.graph.steps))

    def overrides(self, source: ModelSource, files: ModelFiles) -> bool:
        """Return whether a client's configuration holds for a load of these files, too."""
        own = self.source
        repeated = source.config is None and not source.digest and not own.digest
        same = own.origin == source.origin and self.files == files
        return repeated and own.config is not None and same

    def same_version(self, other: PreparedModel, version: int) -> bool:
        """Return whether a version is unchanged, so that it need not be loaded again."""
        return (
            self.source.origin == other.source.origin
            and self.files.shared == other.files.shared
            and self.files.versions.get(version) == other.files.versions.get(version)
            and _without_policy(self.config) == _without_policy(other.config)
        )


class LoadError(BridgeError):
    """Why a model, or some of its versions, cannot be served.

    - ``reason``: that of versions without a reason of their own.
    - ``reasons``: errors by version.
    """

    def __init__(
        self, message: str, code: ErrorCode, reason: str, reasons: Mapping[int, BridgeError]
    ) -> None:
        super().__init__(message, code)
        self.reason = reason
        self.reasons = reasons

    def why(self, version: int) -> str:
        """Return the reason, for the index, that a version is not served."""
        return self.reasons[version].message if version in self.reasons else self.reason


class NotPrepared(LoadError):
    """A model does not exist, or its configuration is invalid or unsupported, or lacks a member.

    - ``prefix``: Triton's words before the reason.
    - ``present``: the versions in its directory, if that was read.
    """

    def __init__(
        self, prefix: str, reason: str, code: ErrorCode, present: Collection[int] | None = None
    ) -> None:
        super().__init__(f"{prefix}: {reason}", code, reason, {})
        self.present = present


class NoVersion(NotPrepared):
    """A model has no version that its version policy selects."""


class LoadFailed(LoadError):
    """Some versions of a model did not load."""

    def __init__(self, name: str, reasons: Mapping[int, BridgeError]) -> None:
        details = "".join(
            f"version {version} is at UNAVAILABLE state: {_code_name(error)}: {error.message};\n"
            for version, error in sorted(reasons.items())
        )
        message = f"load failed for model '{name}': {details}"
        super().__init__(message, ErrorCode.INVALID_ARG, message, reasons)


class ModelLoader:
    """Reads, checks and starts models."""

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

    async def prepare(
        self, name: str, source: ModelSource, was: PreparedModel | None = None
    ) -> PreparedModel:
        """Read a model's configuration and choose its versions.

        ``was``: what is loaded now; its override stays while the files stay the same, as in Triton, so
        that a load that is repeated changes nothing.

        Raises NotPrepared: INTERNAL for an invalid configuration in the repository; NoVersion: INVALID_ARG; LoadFailed
        for a configuration that this server or machine cannot serve.
        """
        threads, read = self.context.threads, partial(self._read, name, source, was)
        try:
            prepared = await threads.run(f"reading the files of model '{name}'", read)
        except LoadError as error:
            if "KIND_GPU" in error.message:
                self.context.devices.gpus.log_absence()
            raise
        except Exception as error:
            raise not_polled(name, request_error(error, "load").message) from error
        if prepared.config.fallbacks:
            self.context.devices.gpus.log_absence()
        for notice in prepared.config.notices:
            _logger.warning("%s", notice)
        if prepared.config.message.response_cache.enable and self.context.cache is None:
            _logger.warning(
                "model '%s': the field 'response_cache' has no effect: there is no --cache-config, so "
                "every request is executed",
                name,
            )
        return prepared

    def _read(self, name: str, source: ModelSource, was: PreparedModel | None) -> PreparedModel:
        custom_name = self.context.settings.repository.model_config_name
        try:
            renew(source.directory)
            # Before any file is read: later changes count as another state.
            files = read_model_files(source.directory)
            if was is not None and was.overrides(source, files):
                source = replace(source, config=was.source.config)
            override: str | Path | None = source.config
            if override is None:
                override = custom_config(source.directory, custom_name)
            # Counting GPUs may take long.
            config = load_model_config(
                source.directory,
                gpu_count=self._gpu_count,
                gpu_fallback=self._gpu_fallback,
                override=override,
                backends=self._backends,
                draft=self._auto_complete,
            )
            self._refuse_unsupported(config)
            self._refuse_many(config)
        except NotServable as error:
            versions = _versions(name, source, error.policy, files)
            raise LoadFailed(name, dict.fromkeys(versions, error)) from error
        except BridgeError as error:
            # What a client sent is the client's fault.
            code = ErrorCode.INTERNAL if source.config is None else error.code
            raise not_polled(name, error.message, code) from error
        versions = _versions(name, source, config.version_policy, files)
        try:
            graph = draw_graph(config) if is_ensemble(config) else None
        except BridgeError as error:
            raise load_refused(name, error.message, files.versions) from error
        return PreparedModel(source, config, tuple(versions), files, graph)

    def _refuse_many(self, config: ModelConfig) -> None:
        """Refuse more instances than a model may have; each is a process."""
        most = self.context.settings.instances.max_model_instances
        count = sum(group.count * max(1, len(group.gpus)) for group in config.instance_groups)
        if count > most:
            error = invalid(
                f"model '{config.name}' asks for {count} instances: expected at most {most} "
                "(--max-model-instances)"
            )
            raise NotServable(error, config.version_policy)

    def model(self, prepared: PreparedModel, version: int) -> StubModel:
        """Make a version of a model without starting it; raises BridgeError."""
        finish = partial(self._finish, prepared)
        return StubModel(prepared.config, version, prepared.source.directory, self.context, finish)

    def ensemble(
        self, prepared: PreparedModel, version: int, members: Sequence[Model]
    ) -> EnsembleModel:
        """Make a version of an ensemble on the models of its steps; raises BridgeError: INVALID_ARG."""
        assert prepared.graph is not None
        return EnsembleModel(prepared.config, version, prepared.graph, members, self.context)

    def _finish(self, prepared: PreparedModel, returned: str | None) -> ModelConfig:
        """Merge and check the configuration that a model completed."""
        directory = prepared.source.directory
        config = finish_model_config(
            prepared.config,
            returned,
            directory,
            gpu_count=self._gpu_count,
            backends=self._backends,
        )
        self._refuse_unsupported(config)
        if not (config.inputs or config.outputs):
            _logger.warning(
                "model '%s' takes no inputs and returns no outputs: %s/config.pbtxt declares none, and "
                "auto_complete_config adds none",
                config.name,
                directory,
            )
        return config

    def _refuse_unsupported(self, config: ModelConfig) -> None:
        limited = self.context.settings.triton.rates.limited
        refused = unsupported_features(config, rate_limited=limited)
        if refused:
            raise NotServable(unsupported("; ".join(refused)), config.version_policy)

    async def load_versions(self, models: Sequence[StubModel]) -> dict[int, BridgeError]:
        """Load versions of a model concurrently; return the errors of failed ones, by version.

        Cancelling this unloads all of them.
        """
        try:
            results = await asyncio.gather(*(self._load(model) for model in models))
        except asyncio.CancelledError:
            await asyncio.gather(*(model.unload(0.0) for model in models))
            raise
        return {m.version: error for m, error in zip(models, results, strict=True) if error}

    async def _load(self, model: StubModel) -> BridgeError | None:
        level = self.context.progress.level
        _logger.log(level, "loading: %s:%d", model.name, model.version)
        try:
            with self.context.progress.track(
                model.name, model.version, partial(starting_step, model)
            ):
                await model.load()
        except Exception as raised:  # noqa: BLE001  (any failure concerns one model only)
            error = request_error(raised, "load")
            _logger.error(  # noqa: TRY400  (the model's own traceback is in it)
                "failed to load '%s' version %d: %s", model.name, model.version, error.message
            )
            return error
        return None


def _versions(
    name: str, source: ModelSource, policy: VersionPolicy, files: ModelFiles
) -> list[int]:
    """Return the versions of a model to load; raises NoVersion."""
    place = "file:1" if source.digest else f"{source.origin}/1"
    try:
        return served_versions(source.directory, name, policy, place)
    except BridgeError as error:
        raise NoVersion(_refusal(name), error.message, error.code, files.versions) from error


def not_polled(name: str, reason: str, code: ErrorCode = ErrorCode.INTERNAL) -> NotPrepared:
    """Make the error for a model that does not exist or cannot be read; ``code``: whose fault that is."""
    summary = f"failed to load '{name}', failed to poll from model repository"
    return NotPrepared(summary, reason, code)


def load_refused(name: str, reason: str, present: Collection[int] | None = None) -> NotPrepared:
    """Make the error for a model that cannot be served as it is configured; see `NotPrepared`."""
    return NotPrepared(_refusal(name), reason, ErrorCode.INVALID_ARG, present)


def _refusal(name: str) -> str:
    return f"load failed for model '{name}'"


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
