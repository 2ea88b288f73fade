"""Where a model instance is in its life."""

from __future__ import annotations

import enum


class InstanceState(enum.Enum):
    """Where an instance is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILING = "failing"
