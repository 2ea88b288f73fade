"""What an instance needs to know to run its stub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpubridge.engine.environment import StubEnvironment
from gpubridge.engine.warmup import WarmupSample

__all__ = ["InstanceSettings"]


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """What an instance needs to know to run its stub.

    Attributes
    ----------
    name : str
        Triton's form, ``{model}_{group}_{index}``.
    stub : dict
        The fields of the INITIALIZE message: model path, version, ``initialize`` arguments.
    environment : StubEnvironment
        The interpreter.
    output_limit : int
        Bytes of output memory that the stub may make.
    timeout : float or None
        Seconds that one ``execute`` may take.
    device : int or None
        The number of its GPU, if it has one.
    warmup : sequence of WarmupSample
        What it executes before it is ready.
    least_window : int
        Requests that its stub may have at once, however long they take.
    """

    name: str
    stub: dict[str, Any]
    environment: StubEnvironment
    output_limit: int
    timeout: float | None
    device: int | None = None
    warmup: Sequence[WarmupSample] = ()
    least_window: int = 1
