"""The server's log, traces and metrics together."""

from __future__ import annotations

from dataclasses import dataclass

from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings
from gpubridge.telemetry.traces import Traces


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


def open_telemetry(
    log: LogSettings, traces: TraceSettings, metrics: MetricsSettings
) -> ServerTelemetry:
    """Make the server's log, traces and metrics of their settings; the caller's to close."""
    # First: what the others find is logged.
    server_log = ServerLog(log)
    return ServerTelemetry(server_log, Traces(traces), metrics, MachineMetrics(metrics))
