"""The words for the condition of a model, the same wherever people read it.

They are ready, degraded, restarting, failed, loading, unloading and unloaded; ``docs/reference/status.md#conditions``
says what each means.
"""

from __future__ import annotations


def index_condition(state: str, reason: str) -> str:
    """Return the condition that a row of the repository index tells; ``state`` may be empty."""
    if state == "UNAVAILABLE" and reason not in ("", "unloaded"):
        return "failed"
    return "unloaded" if state in ("", "UNAVAILABLE") else state.lower()
