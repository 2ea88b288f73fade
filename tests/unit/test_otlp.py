"""Collectors of OpenTelemetry that answer without end, or send to another host."""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace.export import SpanExportResult
from requests.exceptions import TooManyRedirects

from gpubridge.telemetry.otlp import OtlpExport
from gpubridge.telemetry.settings import OpenTelemetrySettings

MANY = 1 << 26


@contextmanager
def collector(head, most=0):
    """A collector that sends a head and up to so many bytes; yields its URL and what it could send."""
    sent = []

    def answer():
        client, _ = listener.accept()
        with client:
            while b"\r\n\r\n" not in client.recv(1 << 16):
                pass
            client.sendall(head.encode() + b"\r\n\r\n")
            try:
                while sum(sent) < most:
                    sent.append(client.send(bytes(1 << 16)))
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", sent
        thread.join()


@pytest.mark.parametrize("kind", ["Content-Length: 1000000000000", "Connection: close"])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_an_answer_without_end_is_not_read_whole(kind, coding):
    head = f"HTTP/1.1 200 OK\r\n{kind}\r\nContent-Encoding: {coding}"
    with collector(head, MANY) as (url, sent):
        export = OtlpExport(OpenTelemetrySettings(url=url))
        assert export._exporter.export(()) is SpanExportResult.SUCCESS
        export.close()
    # No more than sockets hold.
    assert sum(sent) < MANY


@pytest.mark.parametrize(
    "status", ["302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
)
def test_it_sends_to_no_other_host(status, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"http://127.0.0.1:{other.getsockname()[1]}/v1/traces"
        head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nLocation: {place}"
        with collector(head) as (url, _):
            export = OtlpExport(OpenTelemetrySettings(url=url))
            outcome = None
            # Some versions of the exporter report it themselves.
            with suppress(TooManyRedirects):
                outcome = export._exporter.export(())
            assert outcome is not SpanExportResult.SUCCESS
            export.close()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
