"""HAProxy's configuration of a fleet: the rules of requests, and slots for servers.

A slot is one server of each backend, set by the runtime socket; the servers of all backends but
``http`` follow its health. Each request has the class of its model (`gpubridge.ray.model_classes`),
looked up in a map.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gpubridge.ray.model_classes import SEQUENCE, STATELESS, UNKNOWN

SEQUENCE_HEADER = "x-gpubridge-sequence"
BACKENDS = {
    "http": "http",
    "http_sequences": "http",
    "grpc": "grpc",
    "grpc_sequences": "grpc",
}
"""The protocol of each backend."""

_SERVICE = "/inference.GRPCInferenceService/"
_NO_SERVER = "no server of the fleet is ready"
_CONTROL = (
    "a proxy does not load or unload models, which would reach one replica only: use 'gpubridge ray "
    "load' or 'gpubridge ray unload', or change user_config.models of the Serve application"
)
_MEMORY = (
    "shared memory cannot be registered through a proxy: the server may run on another machine; send "
    "tensors in the request"
)
_SETTINGS = (
    "settings cannot be changed through a proxy, which would reach one replica only: give the servers "
    "flags"
)
_SEQUENCE = (
    f"several replicas serve this sequence model: send the header {SEQUENCE_HEADER} with the same value "
    "(the sequence id, say) in all requests of a sequence, or use a gRPC stream"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """A proxy's endpoints, files and limits.

    - ``metrics_port``: of HAProxy's metrics, and of the fleet's state.
    - ``folder``: of its sockets and its map, for its user alone.
    - ``sockets``: the beginning of the paths of sockets on which it listens, too.
    - ``slots``: the number of servers that it can have.
    - ``retry_bytes``: the largest request that can be sent to another server; also the size of
      HAProxy's buffers, two for each active request.
    """

    address: str
    http_port: int
    grpc_port: int
    metrics_port: int
    folder: Path
    slots: int = 64
    threads: int = 2
    connections: int = 10_000
    retry_bytes: int = 65_536
    check_milliseconds: int = 500
    sockets: Path | None = None

    @property
    def runtime_socket(self) -> Path:
        """The socket of HAProxy's commands."""
        return self.folder / "runtime"

    @property
    def fleet_socket(self) -> Path:
        """The socket of the endpoint that answers for the fleet over HTTP."""
        return self.folder / "fleet-http"

    @property
    def fleet_grpc_socket(self) -> Path:
        """The socket of the endpoint that answers for the fleet over gRPC."""
        return self.folder / "fleet-grpc"

    @property
    def classes(self) -> Path:
        """The map of the models' classes."""
        return self.folder / "classes.map"


def haproxy_config(config: ProxyConfig) -> str:
    """Return the text of HAProxy's configuration file."""
    parts = (
        _common(config),
        _http_frontend(config),
        _grpc_frontend(config),
        _metrics_frontend(config),
        *(_backend(config, name) for name in BACKENDS),
        _fleet_backends(config),
    )
    return "\n".join(textwrap.dedent(part).strip() for part in parts) + "\n"


def _common(config: ProxyConfig) -> str:
    # Windows of HTTP/2 as large as those of the server; frames that fit a buffer.
    frame = min(config.retry_bytes, 65_536)
    return f"""
    global
      no strict-limits
      maxconn {config.connections}
      nbthread {config.threads}
      hard-stop-after 60s
      stats socket {config.runtime_socket} mode 600 level admin
      tune.bufsize {config.retry_bytes}
      tune.h2.max-frame-size {frame}
      tune.h2.fe.initial-window-size {max(config.retry_bytes, 1 << 20)}
      tune.h2.be.initial-window-size {8 << 20}
      tune.h2.fe.max-concurrent-streams 256
      tune.h2.be.max-concurrent-streams 100
    defaults
      mode http
      option http-no-delay
      option redispatch 1
      option clitcpka
      option srvtcpka
      retries 3
      retry-on conn-failure empty-response 503
      http-reuse always
      timeout connect 1s
      timeout check 2s
      timeout http-request 60s
      timeout http-keep-alive 1h
      timeout client 1h
      timeout server 1h
      timeout queue 10s
    """


def _http_frontend(config: ProxyConfig) -> str:
    # The fourth field of /v2/models/NAME/...
    return f"""
    frontend http_clients
      bind {_listen(config, "http", config.http_port)}
      acl inference path_end /infer /generate /generate_stream
      acl model_path path_beg /v2/models/
      acl control path_beg /v2/repository/models/
      acl memory path_beg /v2/systemsharedmemory/ /v2/cudasharedmemory/
      acl named_sequence req.hdr({SEQUENCE_HEADER}) -m found
      http-request return status 200 if {{ path /v2/health/live }}
      http-request return status 200 if {{ path /v2/health/ready }} {{ nbsrv(http) gt 0 }}
      {_refuse_http(503, _NO_SERVER)} if {{ nbsrv(http) eq 0 }}
      {_refuse_http(503, _CONTROL)} if control
      {_refuse_http(400, _MEMORY)} if memory {{ path_end /register }}
      {_refuse_http(503, _SETTINGS)} if METH_POST {{ path_end /trace/setting /v2/logging }}
      http-request set-var(txn.class) path,field(4,/),url_dec,map_str({config.classes},{UNKNOWN}) \
if model_path
      acl stateless var(txn.class) -m str {STATELESS}
      acl sequence var(txn.class) -m str {SEQUENCE}
      {_refuse_http(400, _SEQUENCE)} if inference sequence !named_sequence {{ nbsrv(http) gt 1 }}
      http-request disable-l7-retry if METH_POST !stateless
      http-request wait-for-body time 60s if inference stateless
      use_backend fleet_http if model_path {{ path_end /stats }}
      use_backend http_sequences if named_sequence
      default_backend http
    """


def _grpc_frontend(config: ProxyConfig) -> str:
    # The first field of a ModelInferRequest is the model's name.
    # Of TraceSetting and LogSettings it is what is to change.
    lookup = f"req.body,ungrpc(1),map_str({config.classes},{UNKNOWN})"
    return f"""
    frontend grpc_clients
      bind {_listen(config, "grpc", config.grpc_port)} proto h2
      acl infer path {_SERVICE}ModelInfer
      acl control path {_SERVICE}RepositoryModelLoad {_SERVICE}RepositoryModelUnload
      acl memory path {_SERVICE}SystemSharedMemoryRegister {_SERVICE}CudaSharedMemoryRegister
      acl settings path {_SERVICE}TraceSetting {_SERVICE}LogSettings
      acl named_sequence req.hdr({SEQUENCE_HEADER}) -m found
      {_refuse_grpc(14, _NO_SERVER)} if {{ nbsrv(grpc) eq 0 }}
      {_refuse_grpc(14, _CONTROL)} if control
      {_refuse_grpc(3, _MEMORY)} if memory
      http-request wait-for-body time 60s if infer || settings
      {_refuse_grpc(14, _SETTINGS)} if settings {{ req.body,ungrpc(1) -m found }}
      http-request set-var(txn.class) {lookup} if infer
      acl stateless var(txn.class) -m str {STATELESS}
      acl sequence var(txn.class) -m str {SEQUENCE}
      {_refuse_grpc(3, _SEQUENCE)} if infer sequence !named_sequence {{ nbsrv(grpc) gt 1 }}
      http-request disable-l7-retry if !stateless
      http-after-response set-header content-type application/grpc if {{ res.hdr(grpc-status) -m found }}
      use_backend fleet_grpc if {{ path {_SERVICE}ModelStatistics }}
      use_backend grpc_sequences if named_sequence
      default_backend grpc
    """


def _metrics_frontend(config: ProxyConfig) -> str:
    return f"""
    frontend metrics
      bind {_listen(config, "metrics", config.metrics_port)}
      http-request use-service prometheus-exporter if {{ path /metrics }}
      default_backend fleet_http
    """


def _backend(config: ProxyConfig, name: str) -> str:
    grpc = BACKENDS[name] == "grpc"
    lines = [f"backend {name}"]
    if name.endswith("_sequences"):
        # A sequence stays where it is when servers come, and while its server drains.
        lines += [
            f"balance hdr({SEQUENCE_HEADER})",
            "hash-type consistent",
            "stick-table type string len 128 size 100k expire 1h",
            f"stick on req.hdr({SEQUENCE_HEADER})",
        ]
    else:
        lines.append("balance leastconn")
    if name == "http":
        lines.append("option httpchk GET /v2/health/ready")
        inter = config.check_milliseconds
        health = f"disabled check inter {inter}ms fastinter {max(inter // 4, 1)}ms fall 2 rise 1"
    else:
        health = "track http/s{slot}"
    protocol = " proto h2" if grpc else ""
    lines += [
        # The id is what is hashed: the same at every proxy.
        f"server s{slot} 127.0.0.1:1 id {slot + 1}{protocol} {health.format(slot=slot)}"
        for slot in range(config.slots)
    ]
    return "\n  ".join(lines)


def _fleet_backends(config: ProxyConfig) -> str:
    return f"""
    backend fleet_http
      server fleet unix@{config.fleet_socket}
    backend fleet_grpc
      server fleet unix@{config.fleet_grpc_socket} proto h2
    """


def _refuse_http(status: int, text: str) -> str:
    body = json.dumps({"error": text}, separators=(",", ":"))
    return f"http-request return status {status} content-type application/json string {_word(body)}"


def _refuse_grpc(status: int, text: str) -> str:
    message = quote(text, safe=" ,;:'()=.-")
    return (
        f"http-request return status 200 hdr grpc-status {status} "
        f"hdr grpc-message {_word(message.replace('%', '%%'))}"
    )


def _word(text: str) -> str:
    """Return a text as one word of HAProxy's language."""
    return "'" + text.replace("'", "'\\''") + "'"


def _listen(config: ProxyConfig, endpoint: str, port: int) -> str:
    host = f"[{config.address}]" if ":" in config.address else config.address
    socket = "" if config.sockets is None else f",unix@{config.sockets}-{endpoint}"
    return f"{host}:{port}{socket}"


def slot_commands(slot: int, address: str, ports: dict[str, int]) -> Iterator[str]:
    """Yield the commands that put a ready server into a slot; ``ports``: by protocol."""
    for backend, protocol in BACKENDS.items():
        yield f"set server {backend}/s{slot} addr {address} port {ports[protocol]}"
    yield f"set server http/s{slot} check-port {ports['http']}"
    yield f"set server http/s{slot} health up"
    yield f"set server http/s{slot} state ready"
