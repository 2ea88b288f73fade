"""The command line's flags for the log, traces and metrics; names and meanings are tritonserver's."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from gpubridge.telemetry.logs import LOG_FORMATS, LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.metrics_settings import metrics_settings_from_flags
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.telemetry.trace_settings import trace_settings_from_flags
from gpubridge.telemetry.traces import Traces

__all__ = ["REPLACED_TRACE_FLAGS", "add_telemetry_flags", "telemetry_from_flags"]

REPLACED_TRACE_FLAGS = {
    "--trace-file": "use --trace-config triton,file=FILE",
    "--trace-level": "use --trace-config level=LEVEL",
    "--trace-rate": "use --trace-config rate=N",
    "--trace-count": "use --trace-config count=N",
    "--trace-log-frequency": "use --trace-config triton,log-frequency=N",
}
"""Flags that tritonserver itself calls deprecated, and what to use instead."""


def add_telemetry_flags(command: argparse.ArgumentParser, boolean: Callable[[str], bool]) -> None:
    """Add the flags to a command; ``boolean`` reads a switch."""
    add = command.add_argument
    add("--log-verbose", type=_level, default=0, help="verbose level; 0 for none")
    add("--log-info", type=boolean, default=True, metavar="BOOL", help="log informational lines")
    add("--log-warning", type=boolean, default=True, metavar="BOOL", help="log warnings")
    add("--log-error", type=boolean, default=True, metavar="BOOL", help="log errors")
    add("--log-file", default="", help="where log lines go instead of the console")
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="default",
        help="Triton's lines, those with ISO8601 times, or JSON objects",
    )
    add(
        "--trace-config",
        action="append",
        default=[],
        metavar="[triton,]KEY=VALUE",
        help="a setting of traces: triton,file triton,log-frequency level rate count mode",
    )
    add(
        "--metrics-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of metrics: counter_latencies summary_latencies summary_quantiles "
        "histogram_latencies",
    )
    add(
        "--metrics-interval-ms",
        type=float,
        default=2000.0,
        metavar="MS",
        help="how often the machine is measured",
    )
    for device in ("cpu", "gpu"):
        add(
            f"--allow-{device}-metrics",
            type=boolean,
            default=True,
            metavar="BOOL",
            help=f"measure the machine's {device.upper()}",
        )


def telemetry_from_flags(options: argparse.Namespace) -> ServerTelemetry:
    """Make the server's log, traces and metrics of their flags; the caller's to close.

    Raises
    ------
    BridgeError
        Names the flag, what it expects and what it got.
    """
    traces = trace_settings_from_flags(options.trace_config)
    metrics = metrics_settings_from_flags(
        options.metrics_config,
        interval_ms=options.metrics_interval_ms,
        cpu=options.allow_metrics and options.allow_cpu_metrics,
        gpu=options.allow_metrics and options.allow_gpu_metrics,
    )
    log = LogSettings(
        file=options.log_file,
        info=options.log_info,
        warning=options.log_warning,
        error=options.log_error,
        verbose_level=options.log_verbose,
        format=options.log_format,
    )
    # First: what the others find is logged.
    server_log = ServerLog(log)
    return ServerTelemetry(server_log, Traces(traces), metrics, MachineMetrics(metrics))


def _level(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)
