"""What the link to a stub tells its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpubridge.request import Completed, InferRequest


@dataclass(slots=True)
class ConnectionEvents:
    """What a link tells its owner; called on the event loop.

    ``on_arena_refused`` gets why the stub cannot open its arena; ``on_ready`` the socket by which the model's ``is_ready`` is asked, if it has one, which it then
    owns; ``on_batches`` gets what came of the batches that were answered in one message, and when;
    ``on_responses`` the requests of earlier batches that ended now, and when that was.
    """

    on_completed: Callable[[str | None], None]
    on_ready: Callable[[int | None], None]
    on_failed: Callable[[str], None]
    on_broken: Callable[[str], None]
    on_batches: Callable[[Completed, int], None]
    on_responses: Callable[[list[InferRequest], int], None]
    on_log: Callable[[dict[str, Any]], None]
    on_arena_refused: Callable[[str], None]
