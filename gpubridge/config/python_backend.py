"""The settings of ``--backend-config=python,KEY=VALUE``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import documented

InputPlacement = Literal["source", "device", "host"]
DeviceMemoryHandles = Literal["auto", "legacy", "fd"]
DeviceEvents = Literal["auto", "share", "wait"]
_LONGEST_BUSY_POLL = 10_000
_LEAST_SHM_BYTES = 1024 * 1024


def _timeout(key: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise invalid(f"{key} expects a number of seconds, got '{value}'")
    if seconds <= 0:
        raise invalid(f"{key} can't be smaller than or equal to zero.")
    return seconds


def _seconds(key: str, value: str) -> float:
    return 0.0 if value == "0" else _timeout(key, value)


def _microseconds(key: str, value: str) -> int:
    count = _integer(key, value)
    if not 0 <= count <= _LONGEST_BUSY_POLL:
        raise invalid(f"{key} expects 0 to {_LONGEST_BUSY_POLL} microseconds, got '{value}'")
    return count


def _one_of(*words: str) -> Callable[[str, str], str]:
    def read(key: str, value: str) -> str:
        if value not in words:
            raise invalid(f"{key} expects one of {', '.join(words)}, got '{value}'")
        return value

    return read


def _directory(key: str, value: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or "\0" in value:
        raise invalid(f"{key} expects an absolute path, got '{value}'")
    return path


def _positive(key: str, value: str) -> int:
    count = _integer(key, value)
    if count < 1:
        raise invalid(f"{key} can't be less than 1.")
    return count


def _integer(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise invalid(f"{key} expects an integer, got '{value}'") from None


def _check_default_size(key: str, value: str) -> None:
    if _integer(key, value) < _LEAST_SHM_BYTES:
        # Triton enforces 1 MiB and says 4; clients know the text.
        raise invalid(f"{key} can't be smaller than 4 MiBs")


def _check_growth_size(key: str, value: str) -> None:
    if _integer(key, value) <= 0:
        raise invalid(f"{key} can't be smaller than or equal to zero.")


def _check_prefix(key: str, value: str) -> None:
    if not value:
        raise invalid(f"{key} must at least contain one character.")


_WITHOUT_EFFECT: Mapping[str, Callable[[str, str], object]] = {
    "shm-default-byte-size": _check_default_size,
    "shm-growth-byte-size": _check_growth_size,
    "shm-region-prefix-name": _check_prefix,
    "shm_message_queue_size": _positive,
    "thread-pool-size": _positive,
    # Python models say their batch size themselves, at Triton, too.
    "default-max-batch-size": _integer,
}
"""Triton's keys that have no effect here, each with what checks its text."""


@dataclass(frozen=True, slots=True)
class PythonBackendSettings:
    """The settings of every Python model's stubs: ``--backend-config=python,KEY=VALUE``.

    A key is its field's name with dashes.

    - ``notices``: sentences for the log: Triton's keys that were given and have no effect here.
    """

    stub_timeout_seconds: float | None = documented(
        None,
        "a process that has not connected for so long (ten seconds at least) is ended; not given: never",
        read=_timeout,
    )
    execute_timeout_seconds: float | None = documented(
        None, "a process that works longer on one batch is ended; not given: never", read=_timeout
    )
    input_placement: InputPlacement | None = documented(
        None,
        "where the inputs of models are that do not say: source, device or host",
        read=_one_of(*get_args(InputPlacement)),
    )
    busy_poll_us: int = documented(
        200,
        "microseconds that server and process stay awake for the next message where one request "
        "follows the other; 0 for never",
        read=_microseconds,
    )
    device_arena_bytes: int = documented(
        256 * 1024**2,
        "most device memory of each process with a GPU for what it hands on, taken by use",
        read=_positive,
    )
    device_memory_handles: DeviceMemoryHandles = documented(
        "auto",
        "by what device memory crosses processes: legacy IPC handles, fd for file descriptors of it, "
        "auto for these where those are refused",
        read=_one_of(*get_args(DeviceMemoryHandles)),
    )
    device_events: DeviceEvents = documented(
        "auto",
        "whether GPU work of one model waits for that of another: share, or wait for models that wait "
        "themselves before they hand a tensor on; auto tries the driver when models first do that on a "
        "GPU, for some seconds and with the memory of three contexts, and waits until then",
        read=_one_of(*get_args(DeviceEvents)),
    )
    device_lost_event_seconds: float = documented(
        5.0,
        "a process whose GPU work still waits so long for that of a process which died is ended",
        read=_timeout,
    )
    restart_backoff_limit_seconds: float = documented(
        30.0, "the longest wait before a process that keeps dying is started again", read=_timeout
    )
    spare_stub_seconds: float = documented(
        60.0,
        "while processes of a model on the host died twice within so long, one more is kept ready to "
        "take over; 0 for never",
        read=_seconds,
    )
    environment_cache: Path | None = documented(
        None, "where environments are unpacked; not given: the user's cache", read=_directory
    )
    environment_limit_bytes: int = documented(
        64 * 1024**3, "the most that may come out of one packed environment", read=_positive
    )
    notices: tuple[str, ...] = ()

    @classmethod
    def from_backend_config(cls, pairs: Mapping[str, str]) -> PythonBackendSettings:
        """Return the settings that `pairs`, key to text, spell; INVALID_ARG names a wrong one."""
        values: dict[str, Any] = {}
        notices = []
        for key, value in pairs.items():
            if key in _OWN:
                values[key.replace("-", "_")] = _OWN[key](key, value)
            elif key in _WITHOUT_EFFECT:
                _WITHOUT_EFFECT[key](key, value)
                notices.append(
                    f"--backend-config=python,{key}={value} has no effect: gpubridge has no "
                    "counterpart of this Triton setting"
                )
            else:
                raise _unknown(key)
        return cls(**values, notices=tuple(notices))


def _unknown(key: str) -> BridgeError:
    known = [*_OWN, *_WITHOUT_EFFECT]
    likely = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{likely[0]}'?" if likely else f"known keys are {', '.join(known)}"
    return invalid(f"unknown key '{key}' in --backend-config=python,{key}=...; {hint}")


_OWN: Mapping[str, Callable[[str, str], Any]] = {
    each.name.replace("_", "-"): each.metadata["read"]
    for each in fields(PythonBackendSettings)
    if each.metadata
}
