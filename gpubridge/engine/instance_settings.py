"""What an instance needs to know to run its stub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpubridge.engine.environment import StubEnvironment
from gpubridge.engine.warmup import WarmupSample


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """What an instance needs to know to run its stub.

    - ``name``: Triton's form, ``{model}_{group}_{index}``.
    - ``stub``: the fields of the INITIALIZE message: model path, version, ``initialize`` arguments.
    - ``environment``: the interpreter.
    - ``output_limit``: bytes of output memory that the stub may make.
    - ``timeout``: seconds that one ``execute`` may take.
    - ``device``: the number of its GPU, if it has one.
    - ``warmup``: what it executes before it is ready.
    - ``least_window``: requests that its stub may have at once, however long they take.
    """

    name: str
    stub: dict[str, Any]
    environment: StubEnvironment
    output_limit: int
    timeout: float | None
    device: int | None = None
    warmup: Sequence[WarmupSample] = ()
    least_window: int = 1


def debugged(settings: Iterable[InstanceSettings], port: int) -> list[InstanceSettings]:
    """Have each instance wait for a debugger before it imports its model, and hurry none of them.

    ``port``: of the first instance; the next ones have the ports after it. 0 for any free ones.
    """
    return [
        replace(entry, stub={**entry.stub, "debug_port": port + index if port else 0}, timeout=None)
        for index, entry in enumerate(settings)
    ]
