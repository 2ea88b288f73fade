"""Spans: what a model does for a traced request, as OpenTelemetry's traces show it."""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Union

from gpubridge.pb_utils import host
from gpubridge.pb_utils.exceptions import wrong_type
from gpubridge.transport.messages import LONGEST_SPAN_TEXT, MOST_ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

    from gpubridge.pb_utils.trace import InferenceTrace

    Value = Union[bool, int, float, str]

_MOST_SPANS = 1000
"""Spans of a request that are recorded."""
_INT64 = 1 << 63

_enclosing: ContextVar[tuple[int, int]] = ContextVar("enclosing", default=(0, 0))
"""The trace and the number of the span that is open."""


class Span:
    """Time that a model takes for a part of a request; made by ``InferenceRequest.span``.

    A context manager. Spans that are opened inside of it are its children, as are the requests that the
    model sends. An exception that leaves it is its error. Spans of requests that are not traced cost
    nothing, nor do those that end after the last response count.
    """

    __slots__ = ("_attributes", "_id", "_name", "_outer", "_start", "_trace")

    def __init__(
        self, trace: InferenceTrace, name: str, attributes: Mapping[str, Value] | None = None
    ) -> None:
        if not isinstance(name, str):
            raise wrong_type("name", "str", name)
        self._trace = trace
        self._name = name
        self._attributes: dict[str, Value] = {}
        for key, value in (attributes or {}).items():
            self.set_attribute(key, value)

    def set_attribute(self, key: str, value: Value) -> None:
        """Set an attribute: a bool, int, float or str; more than 128 are ignored."""
        if not isinstance(key, str):
            raise wrong_type("key", "str", key)
        if not isinstance(value, (bool, int, float, str)):
            raise wrong_type("value", "bool, int, float or str", value)
        if isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise wrong_type("value", "an int of 64 bits", value)
        if len(self._attributes) < MOST_ATTRIBUTES or key in self._attributes:
            short = value[:LONGEST_SPAN_TEXT] if isinstance(value, str) else value
            self._attributes[key[:LONGEST_SPAN_TEXT]] = short

    def __enter__(self) -> Self:
        self._outer = _enclosing.get()
        self._id = int.from_bytes(os.urandom(8), "little") or 1
        if self._trace._context is not None:
            _enclosing.set((self._trace._identifier, self._id))
        self._start = time.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        trace, around = self._trace, host.current()
        if trace._context is None:
            return
        end = time.monotonic_ns()
        _enclosing.set(self._outer)
        if around is None or around.record_span is None or trace._spans >= _MOST_SPANS:
            return
        trace._spans += 1
        number, parent = self._outer
        fields: dict[str, Any] = {
            "trace": trace._identifier,
            "id": self._id,
            "parent": parent if number == trace._identifier else 0,
            "name": self._name[:LONGEST_SPAN_TEXT],
            "start": self._start,
            "end": end,
            "attributes": self._attributes,
            "error": "" if kind is None else f"{kind.__name__}: {error}"[:LONGEST_SPAN_TEXT],
        }
        around.record_span(fields)


def enclosing_span(trace: InferenceTrace) -> int:
    """Return the number of the span of a trace that is open; 0 for none."""
    number, span = _enclosing.get()
    return span if number == trace._identifier else 0
