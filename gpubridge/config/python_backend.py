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
        # Triton's text says 4 MiB although it enforces 1.
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
    # As in Triton, without effect on Python models.
    "default-max-batch-size": _integer,
}
"""Triton's keys without effect here, each with the check of its value."""


@dataclass(frozen=True, slots=True)
class PythonBackendSettings:
    """Settings of all stubs: ``--backend-config=python,KEY=VALUE``.

    A key is a field's name with dashes.

    - ``notices``: log lines about given keys without effect.
    """

    stub_timeout_seconds: float | None = documented(
        None,
        "a process that does not connect within this time (at least ten seconds) is ended; not given: never",
        read=_timeout,
    )
    execute_timeout_seconds: float | None = documented(
        None,
        "a process that executes one batch for longer is ended; not given: never",
        read=_timeout,
    )
    input_placement: InputPlacement | None = documented(
        None,
        "default placement of models' inputs: source, device or host",
        read=_one_of(*get_args(InputPlacement)),
    )
    busy_poll_us: int = documented(
        200,
        "microseconds that server and process poll for the next message after a request; 0 for never",
        read=_microseconds,
    )
    device_arena_bytes: int = documented(
        256 * 1024**2,
        "maximum device memory of each process with a GPU for tensors it passes on, allocated by use",
        read=_positive,
    )
    device_memory_handles: DeviceMemoryHandles = documented(
        "auto",
        "handles that share device memory between processes: legacy IPC handles, fd for file descriptors, "
        "auto for fd if legacy ones are refused",
        read=_one_of(*get_args(DeviceMemoryHandles)),
    )
    device_events: DeviceEvents = documented(
        "auto",
        "ordering of GPU work between models: share CUDA events, or wait on the host before a tensor is "
        "passed on; auto tests the driver at the first such tensor on a GPU, for some seconds and with the "
        "memory of three contexts, and waits until then",
        read=_one_of(*get_args(DeviceEvents)),
    )
    device_lost_event_seconds: float = documented(
        5.0,
        "a process whose GPU work still waits after this time for that of a dead process is ended",
        read=_timeout,
    )
    restart_backoff_limit_seconds: float = documented(
        30.0, "maximum delay before a process that keeps dying is restarted", read=_timeout
    )
    spare_stub_seconds: float = documented(
        60.0,
        "while processes of a model on the host died twice within this time, a replacement is kept ready; "
        "0 for never",
        read=_seconds,
    )
    environment_cache: Path | None = documented(
        None,
        "directory for unpacked environments and compiled modules for them; not given: the user's cache",
        read=_directory,
    )
    environment_limit_bytes: int = documented(
        64 * 1024**3, "maximum size of one unpacked environment", read=_positive
    )
    module_build_seconds: float = documented(
        120.0,
        "maximum time that a load waits for the compiled module that is built for the interpreter of a model's "
        "environment; 0 builds none",
        read=_seconds,
    )
    notices: tuple[str, ...] = ()

    @classmethod
    def from_backend_config(cls, pairs: Mapping[str, str]) -> PythonBackendSettings:
        """Parse settings from `pairs` of key and text; raises INVALID_ARG for a wrong one."""
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
