"""The trace that a request belongs to, as a model sees it."""

from __future__ import annotations

__all__ = ["InferenceTrace"]


class InferenceTrace:
    """The trace a request belongs to; passed on to the requests that it causes."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_context", "_identifier")

    def __init__(self, context: str | None = None, /) -> None:
        self._context = context
        # The server's number for it; 0 for none.
        self._identifier = 0

    @classmethod
    def _of(cls, identifier: int) -> InferenceTrace:
        trace = cls()
        trace._identifier = identifier
        return trace

    def get_context(self) -> str | None:
        """Give the OpenTelemetry context as JSON, or None where there is no trace."""
        return self._context
