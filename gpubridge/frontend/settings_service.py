"""What the settings extensions do, whichever door they come through."""

from __future__ import annotations

from typing import Any

from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.logs import LogSettings
from gpubridge.telemetry.settings import TraceSettings

__all__ = ["SettingsService"]


class SettingsService:
    """Shows and changes the settings of the log and of traces.

    Parameters
    ----------
    repository : ModelRepository
        Knows which models there are, and the server's telemetry.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._telemetry = repository.telemetry

    def log(self, changes: dict[str, Any]) -> LogSettings:
        """Apply changes of `LogSettings`, if there are any; returns what holds then."""
        log = self._telemetry.log
        if changes:
            log.change(**changes)
        return log.settings

    def check_model(self, model: str) -> None:
        """Refuse a model that is not loaded; empty for the server.

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words.
        """
        if model and not self._repository.versions(model):
            raise BridgeError(f"Request for unknown model : {model}", ErrorCode.INVALID_ARG)

    def trace(self, model: str, changes: dict[str, Any]) -> TraceSettings:
        """Apply changes of `TraceSettings` for a model or the server; returns what holds then.

        Raises
        ------
        BridgeError
            INVALID_ARG for what makes no sense, and for a model that is not loaded.
        """
        self.check_model(model)
        traces = self._telemetry.traces
        if changes:
            traces.update(changes, model)
        return traces.settings(model)
