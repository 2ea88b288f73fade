"""The settings of ``--backend-config=python,KEY=VALUE``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gpubridge.errors import BridgeError, invalid

InputPlacement = Literal["source", "device", "host"]
DeviceMemoryHandles = Literal["auto", "legacy", "fd"]
_LONGEST_BUSY_POLL = 10_000
_LEAST_SHM_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PythonBackendSettings:
    """What the command line says to all Python models.

    - ``stub_timeout_seconds``: a stub that has not connected for so long (ten seconds at least) is
      killed; None for never.
    - ``execute_timeout_seconds``: a stub that works longer on one batch is taken for hung; None for
      never.
    - ``input_placement``: for models that do not say; None leaves it to the instance's kind.
    - ``busy_poll_us``: microseconds that server and stub stay awake for the next message where one
      request follows the other; 0 for never.
    - ``device_arena_bytes``: device memory that each stub with a GPU gets for its outputs.
    - ``device_memory_handles``: by what that crosses processes: legacy IPC handles, or file
      descriptors of it; "auto" takes these where those are refused.
    - ``restart_backoff_limit_seconds``: the longest wait before a stub that keeps dying is started
      again.
    - ``environment_cache``: where models' environments are unpacked; None for the user's cache.
    - ``environment_limit_bytes``: the most that may come out of one packed environment.
    - ``notices``: sentences for the log: Triton's keys that were given and have no effect here.
    """

    stub_timeout_seconds: float | None = None
    execute_timeout_seconds: float | None = None
    input_placement: InputPlacement | None = None
    busy_poll_us: int = 200
    device_arena_bytes: int = 256 * 1024**2
    device_memory_handles: DeviceMemoryHandles = "auto"
    restart_backoff_limit_seconds: float = 30.0
    environment_cache: Path | None = None
    environment_limit_bytes: int = 64 * 1024**3
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


_OWN: Mapping[str, Callable[[str, str], object]] = {
    "stub-timeout-seconds": _timeout,
    "execute-timeout-seconds": _timeout,
    "input-placement": _one_of(*get_args(InputPlacement)),
    "busy-poll-us": _microseconds,
    "device-arena-bytes": _positive,
    "device-memory-handles": _one_of(*get_args(DeviceMemoryHandles)),
    "restart-backoff-limit-seconds": _timeout,
    "environment-cache": _directory,
    "environment-limit-bytes": _positive,
}

_WITHOUT_EFFECT: Mapping[str, Callable[[str, str], object]] = {
    "shm-default-byte-size": _check_default_size,
    "shm-growth-byte-size": _check_growth_size,
    "shm-region-prefix-name": _check_prefix,
    "shm_message_queue_size": _positive,
    "thread-pool-size": _positive,
    # Python models say their batch size themselves, at Triton, too.
    "default-max-batch-size": _integer,
}
