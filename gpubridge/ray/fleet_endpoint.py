"""The endpoint that answers for a whole fleet: its page, statistics of models, targets of Prometheus.

HAProxy passes these requests to it by sockets of its folder.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpubridge.ray.fleet_page import fleet_page
from gpubridge.ray.server_client import request
from gpubridge.schema import message_class

if TYPE_CHECKING:
    from gpubridge.ray.server_address import ServerAddress

_STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"


class FleetEndpoint:
    """An HTTP and a gRPC endpoint on sockets; ``servers`` are those that are asked."""

    def __init__(self, http_socket: Path, grpc_socket: Path) -> None:
        self.servers: tuple[ServerAddress, ...] = ()
        self._workers = ThreadPoolExecutor(8, "fleet-statistics")
        for path in (http_socket, grpc_socket):
            path.unlink(missing_ok=True)
        self._http = _HttpServer(str(http_socket), _Handler)
        self._http.answer = self._answer
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._stop_grpc = _serve_grpc(grpc_socket, self._statistics)

    def close(self) -> None:
        """Close both sockets."""
        self._http.shutdown()
        self._http.server_close()
        self._stop_grpc()
        self._workers.shutdown(wait=False)

    def _answer(self, path: str) -> tuple[int, Any]:
        """Return status and body of an answer: a page, or what becomes JSON."""
        if path == "/":
            return 200, self._page()
        if path == "/targets":
            targets = [f"{each.address}:{each.metrics_port}" for each in self.servers]
            return 200, [{"targets": targets, "labels": {"job": "gpubridge"}}]
        if path.startswith("/v2/models/") and path.endswith("/stats"):
            return self._statistics(path)
        return 404, {"error": f"no such path: {path}"}

    def _statistics(self, path: str) -> tuple[int, Any]:
        """Return the sum of all servers' statistics; an error only if all give one."""
        answers = self._ask(self.servers, path)
        good = [body for status, body in answers if status == 200]
        if good:
            return 200, {"model_stats": _merged_statistics(good)}
        return answers[0] if answers else (503, {"error": "no server of the fleet is ready"})

    def _page(self) -> str:
        servers = self.servers
        answers = self._ask(servers, "/v2/models/stats")
        good = [body for status, body in answers if status == 200]
        return fleet_page(servers, answers, _merged_statistics(good))

    def _ask(self, servers: Sequence[ServerAddress], path: str) -> list[tuple[int, Any]]:
        """Return the answers of servers, which are asked beside each other."""
        asked = [(each.address, each.http_port, "GET", path) for each in servers]
        return list(self._workers.map(lambda each: request(*each), asked))


def _merged_statistics(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [row for body in answers for row in body["model_stats"]]
    return merged_rows(rows, ("name", "version"))


def merged_rows(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of statistics, of which those with equal ``keys`` are added up."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in keys)
        merged[key] = _merged(merged[key], row, keys) if key in merged else dict(row)
    return list(merged.values())


def _merged(
    one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    result = dict(one)
    for name, value in other.items():
        mine = result.get(name)
        if mine is None:
            result[name] = value
        elif name in keys:
            continue
        elif isinstance(value, Mapping):
            result[name] = _merged(mine, value, ())
        elif isinstance(value, list):
            result[name] = merged_rows([*mine, *value], ("batch_size", "type", "id"))
        elif isinstance(value, (int, float)):
            result[name] = max(mine, value) if name == "last_inference" else mine + value
    return result


class _HttpServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    answer: Callable[[str], tuple[int, Any]]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, in JSON but for a page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request."""
        server = self.server
        assert isinstance(server, _HttpServer)
        status, answer = server.answer(self.path.partition("?")[0])
        is_page = isinstance(answer, str)
        body = (answer if is_page else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/html" if is_page else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """Return the client's name in log lines."""
        return "proxy"

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _serve_grpc(path: Path, statistics: Callable[[str], tuple[int, Any]]) -> Callable[[], None]:
    """Serve ModelStatistics over gRPC; return what ends that."""
    import grpc  # noqa: PLC0415  (a dependency of Ray)
    from google.protobuf import json_format  # type: ignore[import-untyped]  # noqa: PLC0415

    def answer(message: Any, context: Any) -> Any:
        parts = [f"/{quote(message.name, safe='')}"] if message.name else []
        parts += [f"/versions/{quote(message.version, safe='')}"] if message.version else []
        status, body = statistics(f"/v2/models{''.join(parts)}/stats")
        if status != 200:
            code = grpc.StatusCode.UNAVAILABLE if status == 503 else grpc.StatusCode.NOT_FOUND
            context.abort(code, body["error"])
        response = message_class("ModelStatisticsResponse")()
        return json_format.ParseDict(body, response, ignore_unknown_fields=True)

    class Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: Any) -> Any:
            if call.method != _STATISTICS:
                return None
            return grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=message_class("ModelStatisticsRequest").FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )

    server = grpc.server(ThreadPoolExecutor(4, "fleet-grpc"), handlers=(Methods(),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return lambda: server.stop(None).wait()
