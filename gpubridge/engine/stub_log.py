"""What a stub says by itself: lines for the log, and that it has fallen back to a slower way."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpubridge.telemetry.logs import log_from_stub

__all__ = ["StubLog"]


class StubLog:
    """Takes the lines of an instance's stubs.

    Attributes
    ----------
    fallbacks : Counter
        How often they fell back, by reason.
    """

    def __init__(self, model: str, instance: str) -> None:
        self._model = model
        self._instance = instance
        self.fallbacks: Counter[str] = Counter()

    def take(self, fields: dict[str, Any]) -> None:
        """Write a line; count it, if it tells of a fallback. Its fields have been checked."""
        fallback = fields.get("fallback")
        if fallback is not None:
            self.fallbacks[fallback] += 1
        log_from_stub(self._model, self._instance, fields)
