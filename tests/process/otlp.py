"""A collector of OpenTelemetry's spans for tests: OTLP over HTTP."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.process.server import wait_until


class Span(NamedTuple):
    """A span as it was received; attributes and events as Python has them."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    start: int
    end: int
    attributes: dict
    events: list
    failed: bool
    message: str
    resource: dict


class Collector:
    """Keeps the spans that it receives; ``url`` is where it listens."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1/traces"
        self.spans: list[Span] = []
        self.exports = 0

    def receive(self, body: bytes) -> None:
        """Take one export."""
        self.exports += 1
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                assert scope.scope.name == "gpubridge"
                self.spans += [_span(span, resource) for span in scope.spans]

    def trace(self, count: int, of: str = "") -> dict[str, Span]:
        """Wait for the spans of one trace, and take them, by name; the only one, or by its id."""

        def complete() -> bool:
            return len([span for span in self.spans if of in ("", span.trace_id)]) >= count

        wait_until(complete, f"{count} spans, got {self.spans}")
        taken = [span for span in self.spans if of in ("", span.trace_id)]
        self.spans = [span for span in self.spans if span not in taken]
        assert len({span.trace_id for span in taken}) == 1
        assert len({span.span_id for span in taken}) == len(taken) == count
        assert all(span.start <= span.end for span in taken)
        by_id = {span.span_id: span for span in taken}
        for span in taken:
            if span.parent_id in by_id:
                parent = by_id[span.parent_id]
                assert parent.start <= span.start
                assert span.end <= parent.end, (span, parent)
        return by_id


@contextmanager
def collector():
    """Run a collector on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Content-Type"] == "application/x-protobuf"
            made.receive(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def _plain(attributes) -> dict:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def _span(span, resource: dict) -> Span:
    return Span(
        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
        span.trace_state, span.kind, span.start_time_unix_nano, span.end_time_unix_nano,
        _plain(span.attributes), [event.name for event in span.events], span.status.code == 2,
        span.status.message, resource,
    )  # fmt: skip
