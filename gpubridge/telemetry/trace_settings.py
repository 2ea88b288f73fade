"""Which requests are traced, how closely, and where to: the values, and the flags that set them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpubridge.errors import BridgeError, ErrorCode

__all__ = [
    "TRACE_LEVELS",
    "TraceSettings",
    "parse_count",
    "parse_levels",
    "parse_unsigned",
    "trace_settings_from_flags",
]

TRACE_LEVELS = ("TIMESTAMPS", "TENSORS")
_UINT32 = (1 << 32) - 1
_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How requests are traced; defaults are Triton's.

    Attributes
    ----------
    level : tuple of str
        Of ``TRACE_LEVELS``, in that order; empty for no traces.
    rate : int
        One request of so many is traced.
    count : int
        Traces still to be made; -1 for no limit.
    log_frequency : int
        So many traces are put into each of the files ``file.0``, ``file.1``, …; 0 for all into
        ``file``.
    file : str
        Where traces go. Fixed when the server starts.
    """

    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0
    file: str = ""

    def check(self) -> None:
        """Refuse settings that make no sense together.

        Raises
        ------
        BridgeError
            INVALID_ARG in Triton's words.
        """
        if not self.rate:
            raise _invalid("Attempting to set invalid trace setting :sample rate must be non-zero")
        if self.level and not self.file:
            raise _invalid("Attempting to set invalid trace setting :trace file name is not given")


def parse_unsigned(name: str, text: str) -> int:
    """Read the number of a setting.

    Raises
    ------
    BridgeError
        INVALID_ARG in Triton's words.
    """
    return _number(name, text, 0, _UINT32)


def parse_count(text: str) -> int:
    """Read ``trace_count``.

    Raises
    ------
    BridgeError
        INVALID_ARG in Triton's words; also for 0, of which Triton says the same without a reason.
    """
    count = _number("trace_count", text, -1, _INT32)
    if not count:
        raise _invalid(
            "Attempting to set invalid trace setting :trace count must be positive, or -1 for no limit"
        )
    return count


def parse_levels(names: Sequence[str]) -> tuple[str, ...]:
    """Read ``trace_level``.

    Raises
    ------
    BridgeError
        INVALID_ARG for a level that there is not, and for OFF beside others.
    """
    if "OFF" in names and len(names) > 1:
        raise _invalid("Expect only one trace level 'OFF' is specified")
    for name in names:
        if name != "OFF" and name not in TRACE_LEVELS:
            raise _invalid(
                f"Unable to parse 'trace_level', got: {name}; expected OFF, or some of "
                f"{', '.join(TRACE_LEVELS)}"
            )
    return tuple(level for level in TRACE_LEVELS if level in names)


def trace_settings_from_flags(entries: Sequence[str]) -> TraceSettings:
    """Read the values of ``--trace-config``: ``[triton,]SETTING=VALUE`` each.

    Raises
    ------
    BridgeError
        INVALID_ARG for what is no setting; UNSUPPORTED for OpenTelemetry.
    """
    settings = TraceSettings()
    levels: list[str] = []
    for entry in entries:
        path, equals, value = entry.partition("=")
        mode, comma, name = path.rpartition(",")
        if not equals or (comma and mode not in ("triton", "opentelemetry")):
            raise _invalid(f"--trace-config expects [triton,]SETTING=VALUE, got {entry!r}")
        if mode == "opentelemetry" or (name == "mode" and value == "opentelemetry"):
            raise BridgeError(
                f"--trace-config: OpenTelemetry is not served, got {entry!r}; use the mode triton, "
                "whose traces go to a file",
                ErrorCode.UNSUPPORTED,
            )
        if name == "level":
            levels.append(value)
        elif name == "rate":
            settings = replace(settings, rate=parse_unsigned("trace_rate", value))
        elif name == "count":
            settings = replace(settings, count=parse_count(value))
        elif name == "log-frequency":
            settings = replace(settings, log_frequency=parse_unsigned("log_frequency", value))
        elif name == "file":
            settings = replace(settings, file=value)
        elif name != "mode" or value != "triton":
            raise _invalid(
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
        raise _invalid(f"Unable to parse '{name}', got: {text}") from None
    if number < -1 and least == -1:
        raise _invalid(f"Unable to parse '{name}'. Expecting value >= -1, got: {text}")
    if not least <= number <= most:
        raise _invalid(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}"
        )
    return number


def _invalid(message: str) -> BridgeError:
    return BridgeError(message, ErrorCode.INVALID_ARG)
