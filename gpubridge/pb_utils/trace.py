"""The trace of a request, as models pass it on."""

from __future__ import annotations


class InferenceTrace:
    """Trace of a request; a model passes it to the requests that it sends."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("_context", "_identifier", "_spans")

    def __init__(self, context: str | None = None, /) -> None:
        self._context = context
        # Number of the trace in the server; 0 for none.
        self._identifier = 0
        # Spans that were recorded.
        self._spans = 0

    @classmethod
    def _of(cls, identifier: int, context: str = "") -> InferenceTrace:
        trace = cls(context or None)
        trace._identifier = identifier
        return trace

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, or None where there is no trace."""
        return self._context


NO_TRACE = InferenceTrace()
