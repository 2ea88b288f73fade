"""Settings and telemetry of an engine that runs one model for its developer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubridge.config import ServerSettings
from gpubridge.config.files import similar_path
from gpubridge.config.settings import BackendSettings, InstanceLimits, RepositorySettings
from gpubridge.errors import invalid
from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings
from gpubridge.telemetry.traces import Traces


def run_settings(
    directory: Path,
    *,
    repositories: Sequence[Path] = (),
    load_models: Sequence[str] = (),
    gpu_fallback: Any = "none",
    backend_directory: Path | None = None,
) -> ServerSettings:
    """Return the settings of a server for the model in a directory and the models that it calls.

    Raises BridgeError: INVALID_ARG without that directory.
    """
    if not directory.is_dir():
        found = "which is a file" if directory.exists() else "which does not exist"
        raise invalid(
            f"expected the directory of a model, got {directory}, {found}{similar_path(directory)}"
        )
    places = [path.resolve() for path in repositories]
    if directory.parent not in places:
        places.insert(0, directory.parent)
    names = [name for name in load_models if name != directory.name]
    return ServerSettings(
        repository=RepositorySettings(
            model_repositories=tuple(places),
            model_control_mode="explicit",
            load_models=tuple(names) if "*" in names else (directory.name, *names),
        ),
        instances=InstanceLimits(gpu_fallback=gpu_fallback),
        backends=BackendSettings(
            directory=backend_directory,
            # Both ends of the channel share one process, where polling of one blocks the other.
            config={"python": {"busy-poll-us": "0"}},
        ),
    )


def run_telemetry(verbose: int, *, reports_loads: bool = False) -> ServerTelemetry:
    """Return telemetry that logs the model's lines and the engine's warnings.

    ``reports_loads``: the caller reports load errors in full, and the log does not.
    """
    quiet = () if verbose else ("gpubridge.engine", "gpubridge.server")
    levels = dict.fromkeys(quiet, logging.WARNING)
    if reports_loads:
        levels["gpubridge.engine.repository"] = logging.CRITICAL
    log = ServerLog(LogSettings(verbose_level=verbose), levels)
    metrics = MetricsSettings(cpu=False, gpu=False)
    return ServerTelemetry(log, Traces(TraceSettings()), metrics, MachineMetrics(metrics))
