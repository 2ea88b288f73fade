"""The model repository: which models and versions there are, and what state each is in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpubridge.config import (
    ModelConfig,
    load_model_config,
    served_versions,
    unsupported_features,
)
from gpubridge.engine.context import EngineContext, EngineLimits
from gpubridge.engine.ensemble.ensemble_model import EnsembleModel
from gpubridge.engine.ensemble.graph import is_ensemble
from gpubridge.engine.ensemble.load_order import load_stages, required_models
from gpubridge.engine.instance_owner import CallServer
from gpubridge.engine.model import Model, StubModel
from gpubridge.engine.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.server_telemetry import ServerTelemetry

__all__ = ["ModelRepository", "VersionStatus"]

_logger = logging.getLogger(__name__)

_TICK_SECONDS = 5.0
_IDLE_SECONDS = 30.0


@dataclass(slots=True)
class VersionStatus:
    """A row of the repository index.

    Attributes
    ----------
    version : int
        0 when not even the versions could be determined.
    state : str
        "LOADING", "READY" or "UNAVAILABLE".
    reason : str
        Why it is unavailable.
    """

    name: str
    version: int
    state: Literal["LOADING", "READY", "UNAVAILABLE"]
    reason: str = ""


class ModelRepository:
    """Loads and holds the models of some directories; owns them and the arena of their requests.

    Parameters
    ----------
    directories : sequence of Path
        Each holds one directory per model.
    calls : callable
        Makes who serves the models' calls of each other.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        limits: EngineLimits,
        gpu_count: int,
        gpu_fallback: Literal["none", "host"],
        calls: Callable[[ModelRepository], CallServer],
        telemetry: ServerTelemetry,
    ) -> None:
        self._directories = directories
        self._limits = limits
        self._gpu_count = gpu_count
        self._gpu_fallback = gpu_fallback
        self.telemetry = telemetry
        telemetry.log.on_change(self._tell_log_levels)
        self._models: dict[str, dict[int, Model]] = {}
        self._statuses: dict[tuple[str, int], VersionStatus] = {}
        self._housekeeper: asyncio.Task[None] | None = None
        self._closing = False
        regions = Regions(limits.arena_limit)
        self.arena = regions.arena
        self._context = EngineContext(regions, limits, telemetry, calls(self))

    # -- life ----------------------------------------------------------------------------------

    async def load_all(self) -> None:
        """Load every model of the directories; a model that fails leaves its reason in the index."""
        self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())
        found: dict[str, Path] = {}
        for directory in self._directories:
            for path in _model_directories(directory):
                if path.name in found:
                    self._fail(
                        path.name,
                        0,
                        f"model is defined in both {found[path.name].parent} "
                        f"and {directory}: every model must have one directory",
                    )
                else:
                    found[path.name] = path
        twice = {name for name, version in self._statuses if version == 0}
        prepared = {
            name: models
            for name, path in sorted(found.items())
            if name not in twice and (models := self._prepare(path))
        }
        required = {name: required_models(models[0].config) for name, models in prepared.items()}
        stages, circular = load_stages(required)
        for name, reason in circular.items():
            self._fail(name, 0, reason)
        for stage in stages:
            await asyncio.gather(
                *(self._load_version(model) for name in stage for model in prepared[name])
            )

    async def close(self, seconds: float) -> None:
        """Drain and unload every model, then give the arena back."""
        self._closing = True
        # Ensembles first: what they have under way needs the others.
        for ensembles in (True, False):
            models = [m for m in self.loaded() if isinstance(m, EnsembleModel) is ensembles]
            await asyncio.gather(*(model.unload(seconds) for model in models))
        self._models.clear()
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
        self._context.regions.close()

    def _prepare(self, path: Path) -> list[Model]:
        """Read a model's configuration and make its versions; none if that fails."""
        name = path.name
        try:
            config = load_model_config(
                path, gpu_count=self._gpu_count, gpu_fallback=self._gpu_fallback
            )
            refused = unsupported_features(config)
            if refused:
                raise BridgeError("; ".join(refused), ErrorCode.UNSUPPORTED)
            versions = served_versions(path, name, config.version_policy)
            models = [self._make(config, version, path) for version in versions]
        except BridgeError as error:
            self._fail(name, 0, error.message)
            return []
        for notice in config.notices:
            _logger.info("model '%s': %s", name, notice)
        return models

    def _make(self, config: ModelConfig, version: int, path: Path) -> Model:
        if is_ensemble(config):
            return EnsembleModel(config, version, self, self._context)
        return StubModel(config, version, path, self._context)

    async def _load_version(self, model: Model) -> None:
        key = (model.name, model.version)
        self._statuses[key] = VersionStatus(*key, "LOADING")
        _logger.info("loading: %s:%d", *key)
        try:
            await model.load()
        except BridgeError as error:
            self._fail(*key, error.message)
            return
        self._models.setdefault(model.name, {})[model.version] = model
        self._statuses[key] = VersionStatus(*key, "READY")
        _logger.info("successfully loaded '%s' version %d", *key)

    def _fail(self, name: str, version: int, reason: str) -> None:
        self._statuses[name, version] = VersionStatus(name, version, "UNAVAILABLE", reason)
        where = f" version {version}" if version else ""
        _logger.error("failed to load '%s'%s: %s", name, where, reason)

    # -- look-ups ------------------------------------------------------------------------------

    def find(self, name: str, version: int | None) -> Model:
        """Return a loaded model; its highest version when none is asked for.

        Raises
        ------
        BridgeError
            NOT_FOUND in Triton's words.
        """
        versions = self._models.get(name)
        if not versions:
            raise BridgeError(
                f"Request for unknown model: '{name}' is not found", ErrorCode.NOT_FOUND
            )
        if version is None:
            return versions[max(versions)]
        model = versions.get(version)
        if model is None:
            raise BridgeError(
                f"Request for unknown model: '{name}' version {version} is not found",
                ErrorCode.NOT_FOUND,
            )
        return model

    def versions(self, name: str) -> list[int]:
        """Return the loaded versions of a model, ascending."""
        return sorted(self._models.get(name, {}))

    def selected(self, name: str, version: int | None) -> list[Model]:
        """Return the loaded versions of a model, or the one asked for: whose statistics are wanted.

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words, which are other than those of :meth:`find`.
        """
        versions = self._models.get(name)
        if not versions:
            raise BridgeError(f"requested model '{name}' is not available", ErrorCode.INVALID_ARG)
        if version is None:
            return [versions[number] for number in sorted(versions)]
        if version not in versions:
            raise BridgeError(
                f"requested model version is not available for model '{name}'",
                ErrorCode.INVALID_ARG,
            )
        return [versions[version]]

    def loaded(self) -> Iterator[Model]:
        """Every loaded model version, by name and version."""
        for name in sorted(self._models):
            versions = self._models[name]
            yield from [versions[number] for number in sorted(versions)]

    def index(self) -> list[VersionStatus]:
        """The repository index, by name and version."""
        return [self._statuses[key] for key in sorted(self._statuses)]

    def control_error(self) -> BridgeError:
        """Return the answer to a client that wants to load or unload a model: not in this mode."""
        return BridgeError(
            "explicit model load / unload is not allowed if polling is enabled",
            ErrorCode.UNAVAILABLE,
        )

    @property
    def failures(self) -> list[VersionStatus]:
        """The models that did not load."""
        return [status for status in self.index() if status.state == "UNAVAILABLE"]

    def _tell_log_levels(self) -> None:
        for model in self.loaded():
            model.tell_log_levels()

    # -- housekeeping --------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Enforce time limits and give idle memory back, for as long as the server runs."""
        limit = self._limits.stub_timeout
        tick = _TICK_SECONDS if limit is None else min(_TICK_SECONDS, max(limit / 8, 0.02))
        clock = asyncio.get_running_loop().time
        due = clock() + _TICK_SECONDS
        while True:
            await asyncio.sleep(tick)
            models = list(self.loaded())
            if limit is not None:
                for model in models:
                    model.check_time_limit()
            if clock() >= due:
                due = clock() + _TICK_SECONDS
                for model in models:
                    model.housekeep()
                self.arena.trim(_IDLE_SECONDS)


def _model_directories(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise BridgeError(
            f"failed to stat model repository {directory}: {error.strerror}", ErrorCode.INVALID_ARG
        ) from error
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
