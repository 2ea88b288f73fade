"""Spans of traced requests: their recording, and the W3C trace context around them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MOST_STATE = 512
_MOST_STAMPS = 10_000
_MOST_SPANS = 1000
"""Spans of models that a trace keeps."""
_MODEL_STAMPS = ("REQUEST_START", "QUEUE_START", "REQUEST_END")

Events = list[tuple[str, int]]
"""Names and times of a span's events."""


class SpanContext(NamedTuple):
    """A span to which others are children; ``state`` is the text of its ``tracestate``."""

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""
    remote: bool = False


class Span(NamedTuple):
    """A completed span, with times in CLOCK_MONOTONIC nanoseconds; ``error`` is the text of one."""

    name: str
    span_id: int
    parent: SpanContext | None
    start: int
    end: int
    attributes: Mapping[str, Any] = {}
    events: Sequence[tuple[str, int]] = ()
    error: str = ""
    server: bool = False


class SpanTree(NamedTuple):
    """Completed spans of one request; ``unix_ns`` is what a time of day has over theirs."""

    context: SpanContext
    unix_ns: int
    spans: Sequence[Span]


def parse_context(traceparent: bytes, tracestate: bytes) -> SpanContext | None:
    """Parse the headers of a W3C trace context; None if they are not valid."""
    read = _PARENT.fullmatch(traceparent)
    if read is None or read[1] == b"ff" or (read[1] == b"00" and read[5] is not None):
        return None
    trace_id, span_id = int(read[2], 16), int(read[3], 16)
    if not trace_id or not span_id:
        return None
    state = tracestate.decode("ascii", "replace") if len(tracestate) <= _MOST_STATE else ""
    return SpanContext(trace_id, span_id, bool(int(read[4], 16) & 1), state, remote=True)


class SpanTrace:
    """The incomplete spans of one request of a model; takes the time stamps of a `Trace`.

    - ``parent``: the span that caused the request, if any; of another server if it is ``remote``.
    - ``caused``: whether another traced request did; otherwise the trace gets a span of the server.
    - ``export``: gets the spans once they are complete.
    """

    __slots__ = (
        "__weakref__", "_attributes", "_error", "_export", "_of_model", "_open", "_own", "_parent",
        "_root", "_stamps", "_unix_ns", "identifier", "model", "sampler",
    )  # fmt: skip

    tensors = False

    def __init__(
        self,
        sampler: Any,
        identifier: int,
        fields: Mapping[str, Any],
        parent: SpanContext | None,
        export: Callable[[SpanTree], None],
        *,
        caused: bool,
    ) -> None:
        self.sampler = sampler
        self.identifier = identifier
        self.model = fields["model_name"]
        self._attributes = {
            "triton.trace_id": identifier,
            "triton.trace_parent_id": 0,
            **{f"triton.{name}": value for name, value in fields.items() if name != "parent_id"},
        }
        if "parent_id" in fields:
            self._attributes["triton.trace_parent_id"] = fields["parent_id"]
        self._parent = parent
        trace_id = secrets.randbits(128) if parent is None else parent.trace_id
        self._own = SpanContext(trace_id, _new_id(), state="" if parent is None else parent.state)
        self._root = 0 if caused else _new_id()
        self._stamps: list[tuple[str, int, Mapping[str, Any]]] = []
        self._of_model: list[Span] = []
        self._error = ""
        self._export = export
        self._open = True
        self._unix_ns = time.time_ns() - time.monotonic_ns()

    @property
    def context(self) -> str:
        """The W3C trace context of the model's span as JSON."""
        own = self._own
        context = {"traceparent": f"00-{own.trace_id:032x}-{own.span_id:016x}-01"}
        if own.state:
            context["tracestate"] = own.state
        return orjson.dumps(context).decode()

    def span(self, span_id: int) -> SpanContext:
        """Return one of the trace's spans as a parent: one of the model's process, or with 0 its own."""
        return self._own._replace(span_id=span_id) if span_id else self._own

    def stamp(self, name: str, nanoseconds: int = 0, **attributes: Any) -> None:
        """Add a time stamp in CLOCK_MONOTONIC nanoseconds; 0 for now."""
        if len(self._stamps) < _MOST_STAMPS:
            self._stamps.append((name, nanoseconds or time.monotonic_ns(), attributes))

    def tensor(self, *_: Any) -> None:
        """Ignore a tensor."""

    def fail(self, message: str) -> None:
        """Note the error that the request ended with."""
        self._error = message

    def add(self, parent: int, span: Span) -> None:
        """Add a span of the model's process, below another one; with 0 below the model's."""
        if len(self._of_model) < _MOST_SPANS:
            self._of_model.append(span._replace(parent=self.span(parent)))

    def end(self) -> None:
        """Complete the trace, once."""
        if self._open:
            self._open = False
            self._export(SpanTree(self._own, self._unix_ns, list(self._spans())))

    def _spans(self) -> Iterator[Span]:
        own, queued = self._own, 0
        at_server: Events = []
        at_model: Events = []
        batch: Events = []
        for name, ns, attributes in self._stamps:
            if name in _MODEL_STAMPS:
                at_model.append((name, ns))
                queued = ns if name == "QUEUE_START" else queued
            elif not name.startswith("COMPUTE_"):
                at_server.append((name, ns))
            elif name == "COMPUTE_START":
                yield Span("queue", _new_id(), own, queued, ns)
                batch = [(name, ns)]
            else:
                batch.append((name, ns))
                if name == "COMPUTE_END":
                    yield Span("compute", _new_id(), own, batch[0][1], ns, attributes, batch)
        yield from self._of_model
        start, end = at_model[0][1], max(ns for _, ns in at_model)
        parent = self._parent
        if self._root:
            times = [start, end, *(ns for _, ns in at_server)]
            yield Span(
                "InferRequest", self._root, parent, min(times), max(times), events=at_server,
                error=self._error, server=True,
            )  # fmt: skip
            parent = own._replace(span_id=self._root)
        yield Span(
            self.model, own.span_id, parent, start, end, self._attributes, at_model, self._error
        )


def _new_id() -> int:
    return secrets.randbits(64) or 1
