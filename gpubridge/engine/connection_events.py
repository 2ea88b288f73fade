"""What the link to a stub tells its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpubridge.dataplane import InstanceFeed


@dataclass(slots=True)
class ConnectionEvents:
    """What a link tells its owner; called on the event loop.

    ``feed`` is the instance's, which hears of answered batches; ``on_arena_refused`` gets why the stub
    cannot open its arena; ``on_ready`` the socket by which the model's ``is_ready`` is asked, if it has
    one, which it then owns.
    """

    feed: InstanceFeed
    on_completed: Callable[[str | None], None]
    on_ready: Callable[[int | None], None]
    on_failed: Callable[[str], None]
    on_broken: Callable[[str], None]
    on_log: Callable[[dict[str, Any]], None]
    on_arena_refused: Callable[[str], None]
