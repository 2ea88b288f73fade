"""Instances of models that somebody debugs: where they wait for the debugger, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpubridge.engine.instance_settings import InstanceSettings

__all__ = ["debugged"]


def debugged(settings: Iterable[InstanceSettings], port: int) -> list[InstanceSettings]:
    """Have each instance wait for a debugger before it imports its model, and hurry none of them.

    Parameters
    ----------
    port : int
        Of the first instance; the next ones have the ports after it. 0 for any free ones.
    """
    return [
        replace(entry, stub={**entry.stub, "debug_port": port + index if port else 0}, timeout=None)
        for index, entry in enumerate(settings)
    ]
