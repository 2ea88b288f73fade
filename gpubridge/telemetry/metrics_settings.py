"""Which metrics are offered: the values, and the flags that set them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["MetricsSettings", "metrics_settings_from_flags"]

_SWITCHES = ("counter_latencies", "summary_latencies", "histogram_latencies")


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Which metrics are offered; defaults are Triton's.

    Attributes
    ----------
    counter_latencies, summary_latencies, histogram_latencies : bool
        In which forms durations are offered.
    summary_quantiles : tuple of (float, float)
        Each quantile and the error that it may have; here none has any but that of its window.
    interval_ms : float
        Gauges of the machine are measured anew after so many milliseconds.
    cpu, gpu : bool
        Whether the machine's CPU, its GPUs are measured.
    """

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
    interval_ms: float = 2000.0
    cpu: bool = True
    gpu: bool = True


def metrics_settings_from_flags(
    entries: Sequence[str], *, interval_ms: float, cpu: bool, gpu: bool
) -> MetricsSettings:
    """Read the values of ``--metrics-config`` (``SETTING=VALUE`` each) and the flags beside it.

    Raises
    ------
    BridgeError
        INVALID_ARG for what is no setting.
    """
    if not interval_ms > 0:
        raise _invalid(f"--metrics-interval-ms expects a number above 0, got {interval_ms:g}")
    settings = MetricsSettings(interval_ms=interval_ms, cpu=cpu, gpu=gpu)
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals:
            raise _invalid(f"--metrics-config expects SETTING=VALUE, got {entry!r}")
        if name in _SWITCHES:
            if value.lower() not in ("true", "false"):
                raise _invalid(f"--metrics-config {name} expects true or false, got {value!r}")
            # A name of a variable: mypy cannot know its field.
            changes: dict[str, bool] = {name: value.lower() == "true"}
            settings = replace(settings, **changes)  # type: ignore[arg-type]
        elif name == "summary_quantiles":
            settings = replace(settings, summary_quantiles=_quantiles(value))
        else:
            raise _invalid(
                f"--metrics-config expects one of {', '.join(_SWITCHES)}, summary_quantiles, got "
                f"{name!r}"
            )
    return settings


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
            raise _invalid(
                "--metrics-config summary_quantiles expects QUANTILE:ERROR pairs of numbers from 0 "
                f"to 1 with commas between, got {text!r}"
            )
        pairs.append(read)
    return tuple(pairs)


def _invalid(message: str) -> BridgeError:
    return BridgeError(message, ErrorCode.INVALID_ARG)
