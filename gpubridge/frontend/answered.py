"""Counts of answered requests, by endpoints with fixed names: no client chooses a label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpubridge.dataplane import RequestCounts
from gpubridge.telemetry.exposition import Family

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


class AnsweredRequests:
    """The counts of the server's HTTP listeners and of its gRPC methods.

    - ``grpc``: counts by the number of a method and one, those of unknown methods at 0.
    - ``methods``: names of the methods, by number.
    """

    def __init__(self, grpc: RequestCounts, methods: Sequence[str]) -> None:
        self.http = RequestCounts(len(HTTP_ENDPOINTS))
        self._grpc = grpc
        self._methods = (OTHER, *methods)

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
        yield from (http, grpc)
