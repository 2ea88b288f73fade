"""Export of spans to a collector by OpenTelemetry's SDK, with OTLP over HTTP."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter
from requests.exceptions import TooManyRedirects
from urllib3.exceptions import HTTPError

from gpubridge.telemetry import spans as recorded
from gpubridge.telemetry.settings import OpenTelemetrySettings

_logger = logging.getLogger(__name__)
_LOST = "opentelemetry.exporter", "opentelemetry.sdk"
"""Loggers of what keeps spans from the collector."""
_SERVICE = "triton-inference-server"
"""As Triton's, unless the settings or the environment have a name."""
_REPORT_SECONDS = 60.0
_CLOSE_SECONDS = 5.0
_PROVIDER = "OTLP_HTTP_CREDENTIAL_PROVIDER", "OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
_ANSWER_BYTES = 1 << 14
"""Read of a collector's answer, which has a status and at most a reason."""
_SCOPE = InstrumentationScope("gpubridge")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _ShortAnswers(HTTPAdapter):
    """Reads no more of a collector's answer than its beginning, also of one that never ends.

    What another host is to have, the settings say: headers may have keys, so that no collector names one.
    """

    def send(self, request: PreparedRequest, **how: Any) -> Response:  # type: ignore[override]
        """Send a request; return the response, with its body read; raises RequestException."""
        response = super().send(request, **how)
        try:
            body = response.raw.read(_ANSWER_BYTES, decode_content=True)
        except HTTPError:
            # Its status says what became of the spans.
            body = b""
        # A connection with more to read is not used again.
        response.raw.close()
        response.raw = BytesIO(body)
        target = urlsplit(response.headers.get("location", ""))
        if response.is_redirect and target.netloc not in ("", urlsplit(request.url).netloc):
            raise TooManyRedirects(f"the collector redirects to another host, {target.netloc!r}")
        return response


def _session() -> Session | None:
    """Return what exports; None where the environment names a provider of credentials that does."""
    if any(name.endswith(_PROVIDER) for name in os.environ):
        return None
    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _ShortAnswers())
    return session


class OtlpExport:
    """Exports spans in a thread; drops the oldest of too many.

    The URL and attributes that are not given are those of the environment (``OTEL_...``).
    """

    def __init__(self, settings: OpenTelemetrySettings) -> None:
        self._resource = Resource.create(dict(settings.resource))
        if str(self._resource.attributes["service.name"]).startswith("unknown_service"):
            self._resource = self._resource.merge(Resource({"service.name": _SERVICE}))
        self._report = _LossReport()
        self._exporter = OTLPSpanExporter(settings.url or None, session=_session())
        self._processor = BatchSpanProcessor(
            self._exporter,
            settings.bsp_max_queue_size,
            settings.bsp_schedule_delay,
            settings.bsp_max_export_batch_size,
        )

    def put(self, tree: recorded.SpanTree) -> None:
        """Queue the spans of a trace; does not block."""
        for span in _readable(tree, self._resource):
            self._processor.on_end(span)

    def close(self) -> None:
        """Export what is queued, up to a time limit."""
        # A dead collector: without this, the exporter would retry for longer.
        limit = threading.Timer(_CLOSE_SECONDS, self._exporter.shutdown)
        limit.start()
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        limit.cancel()
        self._report.close()


class _LossReport(logging.Handler):
    """Logs that spans are lost, and why, at most once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0
        for logger in map(logging.getLogger, _LOST):
            logger.addHandler(self)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REPORT_SECONDS
            _logger.warning("traces do not reach the collector: %s", record.getMessage())

    def close(self) -> None:
        for logger in map(logging.getLogger, _LOST):
            logger.removeHandler(self)
            logger.propagate = True
        super().close()


def _readable(tree: recorded.SpanTree, resource: Resource) -> Iterator[ReadableSpan]:
    offset = tree.unix_ns
    state = TraceState.from_header([tree.context.state])
    for span in tree.spans:
        yield ReadableSpan(
            span.name,
            SpanContext(tree.context.trace_id, span.span_id, False, _SAMPLED, state),
            None if span.parent is None else _parent(span.parent, state),
            resource,
            span.attributes,
            [Event(name, timestamp=ns + offset) for name, ns in span.events],
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start + offset,
            end_time=span.end + offset,
            instrumentation_scope=_SCOPE,
        )


def _parent(parent: recorded.SpanContext, state: TraceState) -> SpanContext:
    return SpanContext(parent.trace_id, parent.span_id, parent.remote, _SAMPLED, state)
