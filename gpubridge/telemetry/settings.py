"""Settings of metrics and traces, and their parsing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from gpubridge.errors import invalid
from gpubridge.flags import flag

_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")
TRACE_LEVELS = ("TIMESTAMPS", "TENSORS")
_LEVELS_OF_FLAGS = {
    **dict.fromkeys(("false", "off"), "OFF"),
    **dict.fromkeys(("true", "on", "min", "max"), "TIMESTAMPS"),
}
"""Other words that Triton accepts on its command line."""
_UINT32 = (1 << 32) - 1
_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Enabled metrics; defaults are Triton's.

    Durations are counters, summaries and histograms. ``summary_quantiles`` has quantiles with their
    allowed errors, which are ignored: quantiles are exact within their window.
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
    histograms: bool = flag(
        True,
        "histograms of the durations of requests and the sizes of batches",
        name="metrics-histograms",
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
    """Parse ``SETTING=VALUE`` into a field and its value."""
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
    """Parse comma-separated ``QUANTILE:ERROR`` pairs."""
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
class OpenTelemetrySettings:
    """Settings of the export of spans; what is not given comes from the environment (``OTEL_...``).

    - ``url``: the collector, of OTLP over HTTP; empty for ``http://localhost:4318/v1/traces``.
    - ``resource``: attributes of the server.
    - ``bsp_...``: spans that wait at most, milliseconds between exports, spans of one export; None
      before `completed`.
    """

    url: str = ""
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int | None = None
    bsp_schedule_delay: int | None = None
    bsp_max_export_batch_size: int | None = None

    def changed(self, name: str, value: str) -> OpenTelemetrySettings:
        """Return the settings with another one; raises INVALID_ARG."""
        if name == "url":
            return replace(self, url=_collector(value))
        if name == "resource":
            key, equals, text = value.partition("=")
            if not key or not equals:
                raise invalid(
                    f"--trace-config opentelemetry,resource expects KEY=VALUE, got {value!r}"
                )
            return replace(self, resource=(*self.resource, (key, text)))
        given: dict[str, Any] = {name: _number(name, value, 1, _INT32)}
        return replace(self, **given)

    def completed(self) -> OpenTelemetrySettings:
        """Return the settings with the numbers that are not given; raises INVALID_ARG."""
        made = self
        for name, default in _BATCHES.items():
            if getattr(self, name) is None:
                given = os.environ.get(f"OTEL_{name.upper()}") or str(default)
                made = made.changed(name, given)
        queue, batch = made.bsp_max_queue_size or 0, made.bsp_max_export_batch_size or 0
        if batch > queue and self.bsp_max_export_batch_size is not None:
            raise invalid(
                "--trace-config opentelemetry,bsp_max_export_batch_size expects at most "
                f"bsp_max_queue_size, {queue}, got {batch}"
            )
        return replace(made, bsp_max_export_batch_size=min(queue, batch))


_BATCHES = {
    "bsp_max_queue_size": 2048, "bsp_schedule_delay": 5000, "bsp_max_export_batch_size": 512
}  # fmt: skip
"""Numbers of the export and OpenTelemetry's defaults."""
_OF_OPENTELEMETRY = ("url", "resource", *_BATCHES)
_MODES = ("triton", "opentelemetry")


def _collector(text: str) -> str:
    """Complete the URL of a collector, which may have neither scheme nor path."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        valid = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise invalid(
            "--trace-config opentelemetry,url expects http://HOST:PORT/PATH or https://..., got "
            f"{text!r}"
        )
    return (url if url.path.strip("/") else url._replace(path="/v1/traces")).geturl()


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Settings of request tracing; defaults are Triton's.

    - ``mode``: "triton" writes traces to files, "opentelemetry" exports spans; fixed like the file.
    - ``level``: of ``TRACE_LEVELS``, in that order; empty for no traces.
    - ``rate``: one of so many requests is traced.
    - ``count``: number of remaining traces; -1 for no limit.
    - ``log_frequency``: number of traces in each of the files ``file.0``, ``file.1``, …; 0 for all in
      ``file``, which is fixed when the server starts.
    """

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""
    mode: str = "triton"
    opentelemetry: OpenTelemetrySettings = field(default_factory=OpenTelemetrySettings)

    @property
    def traced(self) -> bool:
        """Return whether requests are traced: they have levels, and a place to go."""
        return bool(self.level) and bool(self.file or self.mode == "opentelemetry")

    def check(self, *, needs_file: bool = True) -> None:
        """Refuse invalid combinations, with Triton's text."""
        if self.mode == "opentelemetry":
            if "TENSORS" in self.level:
                raise invalid(
                    "trace_level TENSORS is of the mode triton; OpenTelemetry has no tensors"
                )
            return
        if not self.rate:
            raise invalid("Attempting to set invalid trace setting :sample rate must be non-zero")
        if needs_file and self.level and not self.file:
            raise invalid("Attempting to set invalid trace setting :trace file name is not given")


def parse_unsigned(name: str, text: str) -> int:
    """Parse the number of a setting; raises INVALID_ARG with Triton's text."""
    return _number(name, text, 0, _UINT32)


def parse_count(text: str) -> int:
    """Parse ``trace_count``; raises INVALID_ARG with Triton's text, as in Triton also for 0."""
    count = _number("trace_count", text, -1, _INT32)
    if not count:
        raise invalid(
            "Attempting to set invalid trace setting :trace count must be positive, or -1 for no limit"
        )
    return count


def parse_levels(names: Sequence[str]) -> tuple[str, ...]:
    """Parse ``trace_level``; raises INVALID_ARG for an unknown level, and for OFF with others."""
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
    """Parse the values ``[MODE,]SETTING=VALUE`` of ``--trace-config``."""
    settings = TraceSettings()
    levels: list[str] = []
    for entry in entries:
        path, equals, value = entry.partition("=")
        mode, comma, name = path.rpartition(",")
        if not equals or (comma and mode.lower() not in _MODES):
            raise invalid(
                f"--trace-config expects [triton|opentelemetry,]SETTING=VALUE, got {entry!r}"
            )
        if mode.lower() == "opentelemetry" and name in _OF_OPENTELEMETRY:
            changed = settings.opentelemetry.changed(name, value)
            settings = replace(settings, opentelemetry=changed)
        elif name == "level":
            levels.append(_LEVELS_OF_FLAGS.get(value.lower(), value.upper()))
        elif name in _READERS and mode.lower() != "opentelemetry":
            settings = replace(settings, **_READERS[name](value))
        elif name == "mode" and value.lower() in _MODES:
            settings = replace(settings, mode=value.lower())
        else:
            raise invalid(
                "--trace-config expects one of level, rate, count, mode=triton|opentelemetry, "
                "triton,file triton,log-frequency and opentelemetry,"
                f"{' opentelemetry,'.join(_OF_OPENTELEMETRY)}, got {entry!r}"
            )
    settings = replace(settings, level=parse_levels(levels))
    # As in Triton, a server starts without a file, and writes no traces.
    settings.check(needs_file=False)
    if settings.mode == "opentelemetry":
        settings = replace(settings, opentelemetry=settings.opentelemetry.completed())
    return settings


_READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "rate": lambda value: {"rate": parse_unsigned("trace_rate", value)},
    "count": lambda value: {"count": parse_count(value)},
    "log-frequency": lambda value: {"log_frequency": parse_unsigned("log_frequency", value)},
    "file": lambda value: {"file": value},
}


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
