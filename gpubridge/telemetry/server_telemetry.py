"""The server's log, metrics and traces together."""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings
from gpubridge.telemetry.traces import Traces


@dataclass(frozen=True, slots=True)
class ServerTelemetry:
    """The log, the traces, the settings of metrics, and the metrics of the machine."""

    log: ServerLog
    traces: Traces
    metrics: MetricsSettings
    machine: MachineMetrics

    def close(self) -> None:
        """Flush and close everything."""
        self.traces.close()
        self.machine.close()
        self.log.close()


def open_telemetry(
    log: LogSettings, traces: TraceSettings, metrics: MetricsSettings
) -> ServerTelemetry:
    """Return the server's log, traces and metrics, which the caller closes."""
    # First, because the others log.
    server_log = ServerLog(log)
    return ServerTelemetry(server_log, Traces(traces), metrics, MachineMetrics(metrics))
