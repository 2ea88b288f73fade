"""Settings of the server: the flags of ``gpubridge serve``, as validated values.

Names, units and meanings are those of tritonserver's flags, where it has them.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_args

from gpubridge.config.backends import PYTHON_BACKEND
from gpubridge.config.normalise import GpuFallback
from gpubridge.config.restrictions import (
    Restrictions,
    read_grpc_restrictions,
    read_http_restrictions,
)
from gpubridge.config.tls import GrpcTls, HttpTls
from gpubridge.config.triton_flags import TritonFlags
from gpubridge.errors import invalid
from gpubridge.flags import check_flags, flag, flags_of, flags_without_effect, invalid_flag
from gpubridge.telemetry.logs import LogSettings
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings, trace_settings_from_flags

CompressionLevel = Literal["none", "low", "medium", "high"]
ModelControlMode = Literal["none", "poll", "explicit"]
StubVariables = Literal["inherit", "clean"]
_HTTP, _GRPC, _METRICS = "HTTP", "gRPC", "Metrics"
_REPOSITORY, _BACKENDS, _MEMORY = "Model repository", "Backends", "Memory"
_MIB = 1024 * 1024
_MAX_PORT = 65535
_USUAL_DEBUG_PORT = 5678
"""Default port of debugpy clients."""


def read_repository(text: str) -> Path:
    """Read a directory, for argparse; one of another machine is refused."""
    if "://" in text:
        raise ArgumentTypeError(
            f"expected a directory of this machine, got {text!r}: copy or mount it first"
        )
    return Path(text)


def read_address(text: str) -> str:
    """Return an address to listen on; of IPv6 also in Triton's forms ``ipv6:[::1]`` and ``[::1]``."""
    return re.sub(r"(ipv[46]:)?\[?([^][]*)\]?", r"\2", text, count=1)


def read_debug_models(texts: Iterable[str]) -> dict[str, int]:
    """Return the port for each ``NAME[:PORT]``, 0 for any free one; or raise INVALID_ARG."""
    ports: dict[str, int] = {}
    for text in texts:
        name, colon, number = text.partition(":")
        if not name or (colon and not (number.isdecimal() and int(number) <= _MAX_PORT)):
            raise invalid_flag("--debug-model", "NAME or NAME:PORT", repr(text))
        port = int(number) if colon else _USUAL_DEBUG_PORT
        if port and port in ports.values():
            raise invalid(f"--debug-model {text}: port {port} is another model's; give NAME:PORT")
        ports[name] = port
    return ports


def read_backend_config(entries: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the keys and values for each backend that ``[BACKEND,]KEY=VALUE`` names."""
    config: dict[str, dict[str, str]] = {}
    for entry in entries:
        # What is for every backend is for Python's: the others have no settings.
        backend, pair = entry.split(",", 1) if "," in entry else (PYTHON_BACKEND, entry)
        key, equals, value = pair.partition("=")
        if not (backend and key and equals):
            raise invalid_flag("--backend-config", "BACKEND,KEY=VALUE", repr(entry))
        config.setdefault(backend, {})[key] = value
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConnections:
    """Limits of HTTP connections; 0 is none. A request that is being executed is never late."""

    flag_prefix: ClassVar[str] = "http-"
    flag_group: ClassVar[str] = _HTTP

    max_connections: int = flag(
        4096,
        "connections open at once, at each HTTP endpoint; for one more the longest idle one is "
        "closed, else it gets 503; 0 for any number",
        least=0,
    )
    header_timeout: float = flag(
        30.0,
        "seconds that a TLS handshake, and the head of a request, may take; 0 for any",
        least=0,
    )
    body_timeout: float = flag(
        60.0,
        "in each so many seconds a body must bring 500 bytes a second, or end; 0: never",
        least=0,
    )
    idle_timeout: float = flag(
        300.0, "seconds that a connection may be open without a request; 0 for any", least=0
    )
    send_timeout: float = flag(
        60.0,
        "in each so many seconds a client must take 500 bytes a second of answers; 0: never",
        least=0,
    )

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def times(self) -> tuple[float, ...]:
        """All time-outs, in seconds."""
        return self.header_timeout, self.body_timeout, self.idle_timeout, self.send_timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConnections:
    """Limits of gRPC connections; 0 is none where nothing else is said.

    Connections without a call, or that are too old, get GOAWAY, which clients take as nothing special.
    """

    flag_prefix: ClassVar[str] = "grpc-"
    flag_group: ClassVar[str] = _GRPC

    max_connections: int = flag(
        4096,
        "connections open at once; for one more the longest idle one gets GOAWAY, else it does; 0 for "
        "any number",
        least=0,
    )
    preface_timeout: float = flag(
        20.0,
        "seconds that a TLS handshake, and a client's preface and settings, may take; 0 for any",
        least=0,
    )
    message_timeout: float = flag(
        60.0,
        "in each so many seconds a message above 64 KiB must bring 500 bytes a second, or end; 0: never",
        least=0,
    )
    idle_timeout: float = flag(
        3600.0, "seconds that a connection may be open without a call; 0 for any", least=0
    )
    send_timeout: float = flag(
        60.0,
        "in each so many seconds a client must take 500 bytes a second of answers; 0: never",
        least=0,
    )
    keepalive_time: int = flag(
        7_200_000, "milliseconds of silence before a client is pinged; 0: never", least=0
    )
    keepalive_timeout: int = flag(
        20_000,
        "milliseconds that the answer to a ping may take before the connection ends; 0 for any",
        least=0,
    )
    keepalive_permit_without_calls: bool = flag(
        False, "ping, and take more than one ping in two hours, also while no call is open"
    )
    http2_max_pings_without_data: int = flag(
        2, "pings sent while nothing else is to be sent; 0 for any number", least=0
    )
    http2_min_recv_ping_interval_without_data: int = flag(
        300_000, "milliseconds between a client's pings while nothing is sent to it", least=0
    )
    http2_max_ping_strikes: int = flag(
        2, "too early pings that are tolerated before GOAWAY; 0 for any number", least=0
    )
    max_connection_age: int = flag(
        0,
        "milliseconds, give or take a tenth, until a client is asked to connect anew; 0: never",
        least=0,
    )
    max_connection_age_grace: int = flag(
        0, "milliseconds that its open calls then get; 0 for any time", least=0
    )
    infer_response_compression_level: CompressionLevel = flag(
        "none",
        "answers to inference are compressed by gzip, else deflate, at level 1, 6 or 9, where clients "
        "accept it and it makes them shorter",
        choices=get_args(CompressionLevel),
    )

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def times(self) -> tuple[float, ...]:
        """All time-outs, in seconds."""
        milliseconds = (
            self.keepalive_time,
            self.keepalive_timeout,
            self.max_connection_age,
            self.max_connection_age_grace,
        )
        seconds = (self.preface_timeout, self.message_timeout, self.idle_timeout, self.send_timeout)
        return (*seconds, *(time / 1000 for time in milliseconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that is fixed when the server starts; port 0 is any free one.

    No flag sets ``model_directories``, those of single models that are served, too, nor
    ``stub_python``, which runs the models that name no interpreter.
    """

    model_repositories: tuple[Path, ...] = flag(
        MISSING,
        "a directory with one directory per model; may be given several times",
        name="model-repository",
        alias="model-store",
        group=_REPOSITORY,
        type=read_repository,
        metavar="DIR",
        read=tuple,
    )
    model_control_mode: ModelControlMode = flag(
        "none",
        "none: every model is loaded at the start; poll: also when its files change; explicit: when "
        "a client says so",
        group=_REPOSITORY,
        choices=get_args(ModelControlMode),
    )
    load_models: tuple[str, ...] = flag(
        (),
        "a model that is loaded at the start in explicit mode; may be given several times, or once "
        "as * for all",
        name="load-model",
        group=_REPOSITORY,
        metavar="NAME",
    )
    repository_poll_secs: int = flag(
        15,
        "seconds between two looks at the models' files in poll mode; 0 for none",
        group=_REPOSITORY,
        least=0,
    )
    model_config_name: str = flag(
        "",
        "configurations are configs/NAME.pbtxt of the models that have such a file",
        group=_REPOSITORY,
        metavar="NAME",
    )
    exit_on_error: bool = flag(
        True, "exit when a model fails to load at the start", group=_REPOSITORY
    )
    disable_auto_complete_config: bool = flag(
        False,
        "models may not complete their configuration: it must be whole",
        group=_REPOSITORY,
        action="store_true",
    )
    strict_model_config: bool = flag(
        False, "the older name of --disable-auto-complete-config", group=_REPOSITORY
    )
    server_id: str = flag("triton", "the server's name, as it tells clients", name="id")
    exit_timeout_secs: int = flag(
        30, "seconds that requests in flight and finalize get at the end", least=0
    )
    strict_readiness: bool = flag(True, "the server is ready only when every model is")
    gpu_fallback: GpuFallback = flag(
        "none",
        "fallback for KIND_GPU instances when no GPU is available: an error, or the host",
        choices=get_args(GpuFallback),
    )
    stub_environment: StubVariables = flag(
        "inherit",
        "environment variables that models' processes see: all of the server's, or clean for a short "
        "list without secrets (docs/models.md)",
        choices=get_args(StubVariables),
    )
    max_model_instances: int = flag(
        256, "how many instances, each a process, one version of a model may have", least=1
    )
    debug_ports: Mapping[str, int] = flag(
        dict,
        "a model whose processes wait for a debugger (debugpy) at loopback's port 5678, or PORT, and "
        "those after it; may be given several times",
        name="debug-model",
        metavar="NAME[:PORT]",
        read=read_debug_models,
    )
    allow_http: bool = flag(True, "serve HTTP", group=_HTTP)
    http_address: str = flag(
        "127.0.0.1", "to listen on", group=_HTTP, metavar="ADDRESS", read=read_address
    )
    http_port: int = flag(8000, "to listen on; 0 for any free one", group=_HTTP)
    reuse_http_port: bool = flag(
        False, "other servers that say so, too, may listen on the port", group=_HTTP
    )
    http_max_input_size: int = flag(
        64 * _MIB, "bytes of the largest request body", group=_HTTP, least=1
    )
    http_header_forward_pattern: str = flag(
        "",
        "a regular expression: headers whose names it matches are parameters of their requests",
        group=_HTTP,
        metavar="PATTERN",
    )
    http_restricted_api: Restrictions = flag(
        dict,
        "endpoints that only requests with the header KEY: VALUE may use: health metadata inference "
        "shared-memory model-config model-repository statistics trace logging, ours: settings (trace "
        "and logging) metrics; may be given several times",
        group=_HTTP,
        metavar="API[,API...]:KEY=VALUE",
        read=read_http_restrictions,
    )
    http_tls: HttpTls = flags_of(HttpTls)
    http_connections: HttpConnections = flags_of(HttpConnections)
    allow_grpc: bool = flag(True, "serve gRPC", group=_GRPC)
    grpc_address: str = flag(
        "127.0.0.1", "to listen on", group=_GRPC, metavar="ADDRESS", read=read_address
    )
    grpc_port: int = flag(8001, "to listen on; 0 for any free one", group=_GRPC)
    reuse_grpc_port: bool = flag(
        False, "other servers that say so, too, may listen on the port", group=_GRPC
    )
    grpc_max_message_size: int = flag(
        2**31 - 1, "bytes of the largest message of a gRPC request", group=_GRPC, least=1
    )
    grpc_header_forward_pattern: str = flag(
        "",
        "a regular expression: headers whose names it matches are parameters of their requests",
        group=_GRPC,
        metavar="PATTERN",
    )
    grpc_restricted_protocol: Restrictions = flag(
        dict,
        "as --http-restricted-api, but metrics; the header is triton-grpc-protocol-KEY",
        group=_GRPC,
        metavar="PROTOCOL[,PROTOCOL...]:KEY=VALUE",
        read=read_grpc_restrictions,
    )
    grpc_tls: GrpcTls = flags_of(GrpcTls)
    grpc_connections: GrpcConnections = flags_of(GrpcConnections)
    allow_metrics: bool = flag(True, "serve metrics", group=_METRICS)
    metrics_address: str = flag(
        "",
        "to listen on; --http-address if not given",
        group=_METRICS,
        metavar="ADDRESS",
        read=read_address,
    )
    metrics_port: int = flag(8002, "to listen on; 0 for any free one", group=_METRICS)
    metrics: MetricsSettings = flags_of(MetricsSettings)
    traces: TraceSettings = flag(
        TraceSettings,
        "a setting of traces: triton,file triton,log-frequency level rate count mode; may be given "
        "several times",
        name="trace-config",
        older={
            "trace-file": "triton,file={}",
            "trace-level": "level={}",
            "trace-rate": "rate={}",
            "trace-count": "count={}",
            "trace-log-frequency": "triton,log-frequency={}",
        },
        group="Tracing",
        metavar="[triton,]KEY=VALUE",
        read=trace_settings_from_flags,
    )
    log: LogSettings = flags_of(LogSettings)
    backend_directory: Path | None = flag(
        None,
        "where your own backends are, as NAME/model.py; they win over those that are shipped",
        group=_BACKENDS,
        type=Path,
        metavar="DIR",
    )
    backend_config: Mapping[str, Mapping[str, str]] = flag(
        dict,
        "a setting of the Python backend, e.g. python,execute-timeout-seconds=30; may be given several "
        "times",
        group=_BACKENDS,
        metavar="python,KEY=VALUE",
        read=read_backend_config,
    )
    request_arena_limit: int = flag(
        1024 * _MIB,
        "bytes of host memory for waiting and running requests, in all",
        group=_MEMORY,
        least=1,
    )
    output_arena_limit: int = flag(
        1024 * _MIB,
        "bytes of host memory for the unsent outputs of one instance",
        group=_MEMORY,
        least=1,
    )
    allow_client_shm: bool = flag(
        False,
        "clients may register their system and CUDA shared memory, which models then map",
        group=_MEMORY,
    )
    client_shm_max_regions: int = flag(
        1024, "how many regions of it may be registered at once", group=_MEMORY, least=1
    )
    triton: TritonFlags = flags_of(TritonFlags)
    model_directories: tuple[Path, ...] = ()
    stub_python: Path = field(default_factory=lambda: Path(sys.executable))

    @property
    def auto_complete(self) -> bool:
        """Return whether models may complete their configuration."""
        return not (self.disable_auto_complete_config or self.strict_model_config)

    def notices(self) -> list[str]:
        """Return a sentence for the log for each flag that was given and has no effect here."""
        others = [
            f"--backend-config={backend},{key} has no effect: only the Python backend has settings here"
            for backend, pairs in self.backend_config.items()
            for key in pairs
            if backend != PYTHON_BACKEND
        ]
        if self.backend_directory is not None and not self.backend_directory.exists():
            others.append(f"--backend-directory={self.backend_directory} is not there")
        tls = [*self.http_tls.notices(), *self.grpc_tls.notices()]
        return [*flags_without_effect(self.triton), *tls, *others]

    def __post_init__(self) -> None:
        # As in Triton, it follows the address of HTTP.
        object.__setattr__(self, "metrics_address", self.metrics_address or self.http_address)
        check_flags(self)
        self._check_ports()
        if self.backend_directory is not None and self.backend_directory.is_file():
            raise invalid_flag("--backend-directory", "a directory", str(self.backend_directory))
        if not self.model_repositories and not self.model_directories:
            raise invalid_flag("--model-repository", "at least one directory", "none")
        for server in ("http", "grpc"):
            pattern = getattr(self, f"{server}_header_forward_pattern")
            try:
                re.compile(pattern)
            except re.error as error:
                name = f"--{server}-header-forward-pattern"
                raise invalid_flag(
                    name, f"a regular expression ({error})", repr(pattern)
                ) from error
        if any(letter in self.model_config_name for letter in "/ \0"):
            raise invalid_flag("--model-config-name", "a file's name", repr(self.model_config_name))
        if self.load_models and self.model_control_mode != "explicit":
            raise invalid(
                "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
            )
        if "*" in self.load_models and len(self.load_models) > 1:
            raise invalid(
                "Wildcard model name '*' must be the ONLY startup model if specified at all."
            )

    def _check_ports(self) -> None:
        taken: dict[tuple[str, int], str] = {}
        for server in ("http", "grpc", "metrics"):
            port, name = getattr(self, f"{server}_port"), f"--{server}-port"
            if not 0 <= port <= _MAX_PORT:
                raise invalid_flag(name, f"a port from 0 to {_MAX_PORT}", str(port))
            if not getattr(self, f"allow_{server}") or port == 0:
                continue
            other = taken.setdefault((getattr(self, f"{server}_address"), port), name)
            if other != name:
                raise invalid_flag(name, f"a port that {other} does not use", str(port))
