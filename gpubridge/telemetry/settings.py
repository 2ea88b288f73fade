"""Settings of metrics and traces: the values, and what is said of them on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpubridge.errors import invalid, unsupported
from gpubridge.flags import flag

_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")
TRACE_LEVELS = ("TIMESTAMPS", "TENSORS")
_LEVELS_OF_FLAGS = {
    **dict.fromkeys(("false", "off"), "OFF"),
    **dict.fromkeys(("true", "on", "min", "max"), "TIMESTAMPS"),
}
"""Other words that Triton takes on its command line."""
_UINT32 = (1 << 32) - 1
_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Metrics that are offered; defaults are Triton's.

    Durations are offered as counters, summaries and histograms. ``summary_quantiles`` has each quantile
    and the error that it may have; here none has any but that of its window.
    """

    flag_group: ClassVar[str] = "Metrics"

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    summary_quantiles: tuple[tuple[float, float], ...] = (
        (0.5, 0.05),
        (0.9, 0.01),
        (0.95, 0.001),
        (0.99, 0.001),
        (0.999, 0.001),
    )
    interval_ms: float = flag(
        2000.0, "milliseconds between two measurements of the machine", name="metrics-interval-ms"
    )
    cpu: bool = flag(True, "measure the machine's CPU", name="allow-cpu-metrics")
    gpu: bool = flag(
        True, "measure the machine's GPUs: pip install nvidia-ml-py", name="allow-gpu-metrics"
    )
    config: tuple[str, ...] = flag(
        (),
        "a setting of metrics: counter_latencies (true), summary_latencies, summary_quantiles, "
        "histogram_latencies; may be given several times",
        name="metrics-config",
        metavar="KEY=VALUE",
    )

    def __post_init__(self) -> None:
        if not self.interval_ms > 0:
            got = f"{self.interval_ms:g}"
            raise invalid(f"--metrics-interval-ms expects a number above 0, got {got}")
        for entry in self.config:
            object.__setattr__(self, *_read_metrics_config(entry))


def _read_metrics_config(entry: str) -> tuple[str, Any]:
    """Return the field that a ``SETTING=VALUE`` sets, and its value."""
    name, equals, value = entry.partition("=")
    if not equals:
        raise invalid(f"--metrics-config expects SETTING=VALUE, got {entry!r}")
    if name == "summary_quantiles":
        return name, _quantiles(value)
    if name not in _SWITCHES:
        raise invalid(
            f"--metrics-config expects one of {', '.join(_SWITCHES)}, summary_quantiles, got {name!r}"
        )
    if value.lower() not in ("true", "false"):
        raise invalid(f"--metrics-config {name} expects true or false, got {value!r}")
    return name, value.lower() == "true"


def _quantiles(text: str) -> tuple[tuple[float, float], ...]:
    """Read ``QUANTILE:ERROR`` pairs with commas between."""
    pairs = []
    for pair in text.split(","):
        quantile, _, error = pair.partition(":")
        try:
            read = float(quantile), float(error)
        except ValueError:
            read = -1.0, -1.0
        if not (0 <= read[0] <= 1 and 0 <= read[1] <= 1):
            raise invalid(
                "--metrics-config summary_quantiles expects QUANTILE:ERROR pairs of numbers from 0 "
                f"to 1 with commas between, got {text!r}"
            )
        pairs.append(read)
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of request tracing; defaults are Triton's.

    - ``level``: of ``TRACE_LEVELS``, in that order; empty for no traces.
    - ``rate``, ``count``: one of so many requests is traced; traces still to be made, -1 for any.
    - ``log_frequency``: so many traces are put into each of the files ``file.0``, ``file.1``, …; 0
      for all into ``file``, which is fixed when the server starts.
    """

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""

    def check(self) -> None:
        """Refuse settings that make no sense together, in Triton's words."""
        if not self.rate:
            raise invalid("Attempting to set invalid trace setting :sample rate must be non-zero")
        if self.level and not self.file:
            raise invalid("Attempting to set invalid trace setting :trace file name is not given")


def parse_unsigned(name: str, text: str) -> int:
    """Read the number of a setting, or raise INVALID_ARG in Triton's words."""
    return _number(name, text, 0, _UINT32)


def parse_count(text: str) -> int:
    """Read ``trace_count``, or raise INVALID_ARG in Triton's words; also for 0, as Triton does."""
    count = _number("trace_count", text, -1, _INT32)
    if not count:
        raise invalid(
            "Attempting to set invalid trace setting :trace count must be positive, or -1 for no limit"
        )
    return count


def parse_levels(names: Sequence[str]) -> tuple[str, ...]:
    """Read ``trace_level``; INVALID_ARG for one that there is not, and for OFF beside others."""
    if "OFF" in names and len(names) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    for name in names:
        if name != "OFF" and name not in TRACE_LEVELS:
            raise invalid(
                f"Unable to parse 'trace_level', got: {name}; expected OFF, or some of "
                f"{', '.join(TRACE_LEVELS)}"
            )
    return tuple(level for level in TRACE_LEVELS if level in names)


def trace_settings_from_flags(entries: Sequence[str]) -> TraceSettings:
    """Read the values of ``--trace-config``: ``[triton,]SETTING=VALUE`` each."""
    settings = TraceSettings()
    levels: list[str] = []
    for entry in entries:
        path, equals, value = entry.partition("=")
        mode, comma, name = path.rpartition(",")
        if not equals or (comma and mode.lower() not in ("triton", "opentelemetry")):
            raise invalid(f"--trace-config expects [triton,]SETTING=VALUE, got {entry!r}")
        mode, value = mode.lower(), value.lower() if name in ("mode", "level") else value
        if "opentelemetry" in (mode, value if name == "mode" else ""):
            raise unsupported(
                f"--trace-config: OpenTelemetry is not served, got {entry!r}; use the mode triton, "
                "whose traces go to a file"
            )
        if name == "level":
            levels.append(_LEVELS_OF_FLAGS.get(value, value.upper()))
        elif name == "rate":
            settings = replace(settings, rate=parse_unsigned("trace_rate", value))
        elif name == "count":
            settings = replace(settings, count=parse_count(value))
        elif name == "log-frequency":
            settings = replace(settings, log_frequency=parse_unsigned("log_frequency", value))
        elif name == "file":
            settings = replace(settings, file=value)
        elif name != "mode" or value != "triton":
            raise invalid(
                "--trace-config expects one of level, rate, count, mode=triton, triton,file and "
                f"triton,log-frequency, got {entry!r}"
            )
    settings = replace(settings, level=parse_levels(levels))
    settings.check()
    return settings


def _number(name: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise invalid(f"Unable to parse '{name}', got: {text}") from None
    if number < -1 and least == -1:
        raise invalid(f"Unable to parse '{name}'. Expecting value >= -1, got: {text}")
    if not least <= number <= most:
        raise invalid(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}"
        )
    return number
