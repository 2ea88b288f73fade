"""Counts of answered requests, by endpoints with fixed names: no client chooses a label."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

from gpubridge.dataplane import AccessLog, RequestCounts
from gpubridge.telemetry.exposition import Family
from gpubridge.telemetry.logs import ServerLog

OTHER = "other"
"""Requests that no endpoint takes."""

HTTP_ENDPOINTS = (
    OTHER,
    # The compiled module knows these three by number: ``InferEndpoint::number``.
    "infer",
    "generate",
    "generate_stream",
    "openai",
    "openai-models",
    "health",
    "metadata",
    "statistics",
    "model-config",
    "model-repository",
    "shared-memory",
    "logging",
    "trace",
    "metrics",
    "status",
)
HTTP_NUMBERS = {name: number for number, name in enumerate(HTTP_ENDPOINTS)}
"""The number of each endpoint, as `HttpExchange.endpoint`."""

_GRPC_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)


def client_of(transport: asyncio.BaseTransport) -> str:
    """Return the address and port of a connection's client."""
    peer = transport.get_extra_info("peername")
    if not peer:
        return ""
    host, port = peer[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AnsweredRequests:
    """The counts of the server's HTTP listeners and of its gRPC methods; owns the access log.

    - ``grpc``: counts by the number of a method and one, those of unknown methods at 0.
    - ``methods``: names of the methods, by number.
    """

    def __init__(self, grpc: RequestCounts, methods: Sequence[str]) -> None:
        self.http = RequestCounts(len(HTTP_ENDPOINTS))
        self._grpc = grpc
        self._log: AccessLog | None = None
        self._methods = (OTHER, *methods)

    def log_to(self, log: ServerLog) -> None:
        """Log each request from now on: where the server logs, in its format."""
        made = AccessLog(os.dup(log.descriptor), log.settings.format, HTTP_ENDPOINTS, self._methods)
        log.on_change(lambda: made.set_format(log.settings.format))
        self._log = self.http.access_log = self._grpc.access_log = made

    def close(self) -> None:
        """Write what waits for the access log."""
        if self._log is not None:
            self._log.close()

    def families(self) -> Iterator[Family]:
        """Yield the families of the counts."""
        http = Family(
            "gpubridge_http_requests_total", "HTTP requests by endpoint and status", "counter"
        )
        for number, status, count in self.http.rows():
            http.add({"endpoint": HTTP_ENDPOINTS[number], "code": str(status)}, count)
        grpc = Family("gpubridge_grpc_requests_total", "gRPC calls by method and status", "counter")
        for number, status, count in self._grpc.rows():
            grpc.add({"endpoint": self._methods[number], "code": _GRPC_CODES[status]}, count)
        dropped = Family(
            "gpubridge_access_log_dropped_total",
            "Requests that are missing in the access log",
            "counter",
        )
        if self._log is not None:
            dropped.add({}, self._log.dropped)
        yield from (http, grpc, dropped)
