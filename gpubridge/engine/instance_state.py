"""Where a model instance is in its life."""

from __future__ import annotations

import enum

__all__ = ["InstanceState"]


class InstanceState(enum.Enum):
    """Where an instance is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILING = "failing"
