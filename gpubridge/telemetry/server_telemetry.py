"""The server's log, traces and metrics together, and the flags that make them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from gpubridge.flags import add_flags, check_flags, from_flags
from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.settings import (
    MetricsSettings,
    read_metrics_config,
    trace_settings_from_flags,
)
from gpubridge.telemetry.traces import Traces

REPLACED_TRACE_FLAGS = {
    "--trace-file": "use --trace-config triton,file=FILE",
    "--trace-level": "use --trace-config level=LEVEL",
    "--trace-rate": "use --trace-config rate=N",
    "--trace-count": "use --trace-config count=N",
    "--trace-log-frequency": "use --trace-config triton,log-frequency=N",
}
"""Flags that tritonserver itself calls deprecated, and what to use instead."""


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


def add_telemetry_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to a command."""
    add_flags(command, LogSettings)
    command.add_argument(
        "--trace-config",
        action="append",
        default=[],
        metavar="[triton,]KEY=VALUE",
        help="a setting of traces: triton,file triton,log-frequency level rate count mode",
    )
    command.add_argument(
        "--metrics-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of metrics: counter_latencies summary_latencies summary_quantiles "
        "histogram_latencies",
    )
    add_flags(command, MetricsSettings)


def telemetry_from_flags(options: argparse.Namespace) -> ServerTelemetry:
    """Make the server's log, traces and metrics of their flags; the caller's to close."""
    traces = trace_settings_from_flags(options.trace_config)
    metrics = read_metrics_config(from_flags(MetricsSettings, options), options.metrics_config)
    if not options.allow_metrics:
        metrics = replace(metrics, cpu=False, gpu=False)
    log = from_flags(LogSettings, options)
    check_flags(log)
    # First: what the others find is logged.
    server_log = ServerLog(log)
    return ServerTelemetry(server_log, Traces(traces), metrics, MachineMetrics(metrics))
