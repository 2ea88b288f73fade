"""What every room of the server tells of itself, and where to."""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.telemetry.logs import ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.metrics_settings import MetricsSettings
from gpubridge.telemetry.traces import Traces

__all__ = ["ServerTelemetry"]


@dataclass(frozen=True, slots=True)
class ServerTelemetry:
    """The log, the traces, which metrics there are, and those of the machine."""

    log: ServerLog
    traces: Traces
    metrics: MetricsSettings
    machine: MachineMetrics

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self.traces.close()
        self.machine.close()
        self.log.close()
