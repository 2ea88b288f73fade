"""Settings of the server: the flags of ``gpubridge serve``, as validated values.

Names, units and meanings are those of tritonserver's flags, if it has them.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from gpubridge.config.backends import PYTHON_BACKEND
from gpubridge.config.connections import (
    GRPC_GROUP,
    HTTP_GROUP,
    GrpcConnections,
    GrpcTls,
    HttpConnections,
    HttpTls,
)
from gpubridge.config.normalise import GpuFallback
from gpubridge.config.origins import read_origins
from gpubridge.config.remote_url import RemoteUrl, read_remote_url
from gpubridge.config.restrictions import (
    Restrictions,
    open_groups,
    read_grpc_restrictions,
    read_http_restrictions,
)
from gpubridge.config.triton_flags import TritonFlags
from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import check_flags, flag, flags_of, flags_without_effect, invalid_flag
from gpubridge.telemetry.logs import LogSettings
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings, trace_settings_from_flags

ModelControlMode = Literal["none", "poll", "explicit"]
StubVariables = Literal["inherit", "clean"]
_MIB = 1024 * 1024
_MAX_PORT = 65535
_USUAL_DEBUG_PORT = 5678
"""Default port of debugpy clients."""


def read_repository(text: str) -> Path | RemoteUrl:
    """Parse a directory or the URL of a remote one, for argparse."""
    if "://" not in text:
        return Path(text)
    try:
        return read_remote_url(text)
    except BridgeError as error:
        raise ArgumentTypeError(error.message) from error


def read_address(text: str) -> str:
    """Return an address to listen on; accepts Triton's forms ``ipv6:[::1]`` and ``[::1]``."""
    return re.sub(r"(ipv[46]:)?\[?([^][]*)\]?", r"\2", text, count=1)


def read_debug_models(texts: Iterable[str]) -> dict[str, int]:
    """Return the port for each ``NAME[:PORT]``, 0 for any free port; raises INVALID_ARG."""
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


def read_cache_config(texts: Iterable[str]) -> int:
    """Parse ``local,size=BYTES``; the last size counts that is not 0. Raises INVALID_ARG."""
    nbytes = 0
    for text in texts:
        kind, _, setting = text.partition(",")
        name, _, value = setting.partition("=")
        if (kind, name) != ("local", "size") or not (value.isascii() and value.isdigit()):
            # Not the value: settings of other caches may be secret.
            raise invalid_flag("--cache-config", "local,size=BYTES", repr(f"{kind},{name}=..."))
        nbytes = int(value) or nbytes
    return nbytes


def read_backend_config(entries: Iterable[str]) -> dict[str, dict[str, str]]:
    """Parse ``[BACKEND,]KEY=VALUE`` into settings by backend."""
    config: dict[str, dict[str, str]] = {}
    for entry in entries:
        # Without a backend, the setting is for Python, the only backend with settings.
        backend, pair = entry.split(",", 1) if "," in entry else (PYTHON_BACKEND, entry)
        key, equals, value = pair.partition("=")
        if not (backend and key and equals):
            raise invalid_flag("--backend-config", "BACKEND,KEY=VALUE", repr(entry))
        config.setdefault(backend, {})[key] = value
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    """Repositories of models, and their loading.

    No flag sets ``model_directories``, the directories of single models to serve.
    """

    flag_group: ClassVar[str] = "Model repository"

    model_repositories: tuple[Path | RemoteUrl, ...] = flag(
        MISSING,
        "a directory with one directory per model, or the s3://, gs:// or az:// URL of one "
        "(docs/how-to/object-storage.md#urls); may be given several times",
        name="model-repository",
        alias="model-store",
        type=read_repository,
        metavar="DIR",
        read=tuple,
    )
    model_cache_dir: Path | None = flag(
        None,
        "a directory for the models of remote repositories, which servers may share; by default in "
        "the user's cache directory",
        type=Path,
        metavar="DIR",
    )
    remote_model_limit: int = flag(
        100 * 1024 * _MIB, "bytes of the files of one model in a remote repository", least=1
    )
    model_control_mode: ModelControlMode = flag(
        "none",
        "none: every model is loaded at the start; poll: also when its files change; explicit: when "
        "a client requests it",
        choices=get_args(ModelControlMode),
    )
    load_models: tuple[str, ...] = flag(
        (),
        "a model that is loaded at the start in explicit mode; may be given several times, or once "
        "as * for all",
        name="load-model",
        metavar="NAME",
    )
    repository_poll_secs: int = flag(
        15,
        "seconds between checks of the models' files in poll mode; 0 for none",
        least=0,
    )
    model_config_name: str = flag(
        "",
        "configurations are configs/NAME.pbtxt of the models that have such a file",
        metavar="NAME",
    )
    exit_on_error: bool = flag(True, "exit when a model fails to load at the start")
    allow_empty_repository: bool = flag(
        False,
        "start although there is no model in a repository whose models are to be loaded, "
        "as with --exit-on-error=false",
    )
    disable_auto_complete_config: bool = flag(
        False,
        "models may not complete their configuration, which must be complete",
        action="store_true",
    )
    strict_model_config: bool = flag(False, "the older name of --disable-auto-complete-config")
    model_directories: tuple[Path, ...] = ()

    @property
    def auto_complete(self) -> bool:
        """Return whether models may complete their configuration."""
        return not (self.disable_auto_complete_config or self.strict_model_config)

    def __post_init__(self) -> None:
        check_flags(self)
        if not self.model_repositories and not self.model_directories:
            raise invalid_flag("--model-repository", "at least one directory", "none")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The server's process: its name, readiness and end."""

    server_id: str = flag("triton", "the server's name in its metadata", name="id")
    exit_timeout_secs: int = flag(
        30, "seconds for requests in flight and finalize when the server stops", least=0
    )
    drain_delay_secs: int = flag(
        0,
        "seconds after SIGTERM in which the server is not ready but serves, so that balancers stop "
        "sending before its ports close; a second signal ends them",
        least=0,
    )
    ports_file: Path | None = flag(
        None,
        "a JSON file with the process and the addresses, written once ready, removed at the end",
        type=Path,
        metavar="PATH",
    )
    exit_with_parent: bool = flag(
        False, "stop, as after SIGTERM, when the parent process ends", action="store_true"
    )
    strict_readiness: bool = flag(True, "the server is ready only when every model is")

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimits:
    """The processes of all models' instances.

    No flag sets ``stub_python``, the interpreter of models without an environment.
    """

    gpu_fallback: GpuFallback = flag(
        "none",
        "fallback for KIND_GPU instances when no GPU is available: an error, or the host",
        choices=get_args(GpuFallback),
    )
    stub_environment: StubVariables = flag(
        "inherit",
        "environment variables of models' processes: all of the server's, or clean for a short "
        "list without secrets (docs/how-to/environments.md#environment-variables)",
        choices=get_args(StubVariables),
    )
    fork_stubs: bool = flag(
        True,
        "fork the processes of models from one that has made their imports; false starts each anew",
    )
    max_model_instances: int = flag(
        256, "maximum instances, each a process, of one version of a model", least=1
    )
    debug_ports: Mapping[str, int] = flag(
        dict,
        "a model whose processes wait for a debugger (debugpy) at loopback's port 5678, or PORT, and "
        "those after it; may be given several times",
        name="debug-model",
        metavar="NAME[:PORT]",
        read=read_debug_models,
    )
    stub_python: Path = field(default_factory=lambda: Path(sys.executable))

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEndpoint:
    """The HTTP endpoint; port 0 is any free port."""

    flag_prefix: ClassVar[str] = "http-"
    flag_group: ClassVar[str] = HTTP_GROUP

    allow: bool = flag(True, "serve HTTP", name="allow-http")
    address: str = flag("127.0.0.1", "to listen on", metavar="ADDRESS", read=read_address)
    port: int = flag(8000, "to listen on; 0 for any free one")
    reuse_port: bool = flag(
        False, "share the port with other servers that set this flag", name="reuse-http-port"
    )
    max_input_size: int = flag(64 * _MIB, "bytes of the largest request body", least=1)
    header_forward_pattern: str = flag(
        "",
        "a regular expression: matching headers become parameters of their requests",
        metavar="PATTERN",
    )
    restrictions: Restrictions = flag(
        dict,
        "endpoints that require the header KEY: VALUE: health metadata inference "
        "shared-memory model-config model-repository statistics trace logging, ours: settings (trace "
        "and logging) metrics openai all; @FILE or @env:NAME has a value on each line, files are read again "
        "on SIGHUP; may be given several times",
        metavar="API[,API...]:KEY=VALUE",
        read=read_http_restrictions,
        name="http-restricted-api",
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        "origins of web pages that may use the HTTP and metrics ports, as https://gpu.example.com; * for "
        "all; may be given several times (docs/reference/protocol.md#web-pages)",
        metavar="ORIGIN[,ORIGIN...]",
        read=read_origins,
    )
    tls: HttpTls = flags_of(HttpTls)
    connections: HttpConnections = flags_of(HttpConnections)

    def __post_init__(self) -> None:
        check_flags(self)
        _check_port("http", self.port)
        _check_pattern("http", self.header_forward_pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcEndpoint:
    """The gRPC endpoint; port 0 is any free port."""

    flag_prefix: ClassVar[str] = "grpc-"
    flag_group: ClassVar[str] = GRPC_GROUP

    allow: bool = flag(True, "serve gRPC", name="allow-grpc")
    address: str = flag("127.0.0.1", "to listen on", metavar="ADDRESS", read=read_address)
    port: int = flag(8001, "to listen on; 0 for any free one")
    reuse_port: bool = flag(
        False, "share the port with other servers that set this flag", name="reuse-grpc-port"
    )
    max_message_size: int = flag(
        2**31 - 1, "bytes of the largest message of a gRPC request", least=1
    )
    header_forward_pattern: str = flag(
        "",
        "a regular expression: matching headers become parameters of their requests",
        metavar="PATTERN",
    )
    restrictions: Restrictions = flag(
        dict,
        "as --http-restricted-api, but metrics and openai; the header is triton-grpc-protocol-KEY",
        metavar="PROTOCOL[,PROTOCOL...]:KEY=VALUE",
        read=read_grpc_restrictions,
        name="grpc-restricted-protocol",
    )
    tls: GrpcTls = flags_of(GrpcTls)
    connections: GrpcConnections = flags_of(GrpcConnections)

    def __post_init__(self) -> None:
        check_flags(self)
        _check_port("grpc", self.port)
        _check_pattern("grpc", self.header_forward_pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEndpoint:
    """The endpoint of metrics; port 0 is any free port."""

    flag_prefix: ClassVar[str] = "metrics-"
    flag_group: ClassVar[str] = "Metrics"

    allow: bool = flag(True, "serve metrics", name="allow-metrics")
    address: str = flag(
        "",
        "to listen on; --http-address if not given",
        metavar="ADDRESS",
        read=read_address,
    )
    port: int = flag(8002, "to listen on; 0 for any free one")
    status_page: bool = flag(
        True,
        "serve the status of the server and its models: a page at / of the metrics port, and "
        "/v2/gpubridge/status there and over HTTP",
        name="allow-status-page",
    )
    status_page_requests: bool = flag(
        False,
        "the status page sends requests to models, too, as the HTTP port takes them",
        name="allow-status-page-requests",
    )

    def __post_init__(self) -> None:
        _check_port("metrics", self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Backends, and the settings that the command line gives them."""

    flag_prefix: ClassVar[str] = "backend-"
    flag_group: ClassVar[str] = "Backends"

    directory: Path | None = flag(
        None,
        "directory of your own backends, as NAME/model.py, which override shipped ones",
        type=Path,
        metavar="DIR",
    )
    config: Mapping[str, Mapping[str, str]] = flag(
        dict,
        "a setting of the Python backend, e.g. python,execute-timeout-seconds=30; may be given several "
        "times",
        metavar="python,KEY=VALUE",
        read=read_backend_config,
    )

    def __post_init__(self) -> None:
        if self.directory is not None and self.directory.is_file():
            raise invalid_flag("--backend-directory", "a directory", str(self.directory))

    def notices(self) -> Iterator[str]:
        """Yield a log line for each given flag without effect."""
        for backend, pairs in self.config.items():
            if backend != PYTHON_BACKEND:
                for key in pairs:
                    yield (
                        f"--backend-config={backend},{key} has no effect: only the Python backend "
                        "has settings here"
                    )
        if self.directory is not None and not self.directory.exists():
            yield f"--backend-directory={self.directory} does not exist"


_PARTS = {"request_arena_limit": 4, "output_arena_limit": 4, "response_store_limit": 16}
"""The default of a limit is at most this part of the memory that the server may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits of host memory, and clients' own memory."""

    flag_group: ClassVar[str] = "Memory"

    request_arena_limit: int = flag(
        1024 * _MIB,
        "bytes of host memory for all waiting and running requests; by default at most a quarter of "
        "the memory that the server may use",
        least=1,
    )
    output_arena_limit: int = flag(
        1024 * _MIB,
        "bytes of host memory for the unsent outputs of one instance; by default at most a quarter",
        least=1,
    )
    response_store_limit: int = flag(
        256 * _MIB,
        "bytes of responses of decoupled models that wait for slow readers; a request and a connection "
        "may have half of them, a model three quarters; by default at most a sixteenth",
        least=1,
    )
    allow_client_shm: bool = flag(
        False,
        "clients may register their system and CUDA shared memory, which models then map",
    )
    client_shm_max_regions: int = flag(1024, "maximum registered regions of client memory", least=1)

    def __post_init__(self) -> None:
        check_flags(self)

    def within(self, usable: int) -> MemoryLimits:
        """Lower limits that have their defaults to parts of ``usable``, the bytes that the server may use."""
        lowered: dict[str, Any] = {}
        for each in fields(self):
            given = getattr(self, each.name)
            if each.name in _PARTS and given == each.default:
                lowered[each.name] = min(given, max(usable // _PARTS[each.name], 1))
        return replace(self, **lowered)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that are fixed when the server starts, by the headings of their flags."""

    repository: RepositorySettings = flags_of(RepositorySettings)
    process: ProcessSettings = flags_of(ProcessSettings)
    instances: InstanceLimits = flags_of(InstanceLimits)
    http: HttpEndpoint = flags_of(HttpEndpoint)
    grpc: GrpcEndpoint = flags_of(GrpcEndpoint)
    metrics_endpoint: MetricsEndpoint = flags_of(MetricsEndpoint)
    metrics: MetricsSettings = flags_of(MetricsSettings)
    traces: TraceSettings = flag(
        TraceSettings,
        "a setting of traces: mode=triton|opentelemetry level rate count, triton,file "
        "triton,log-frequency, opentelemetry,url opentelemetry,resource=KEY=VALUE and "
        "opentelemetry,bsp_max_queue_size bsp_schedule_delay bsp_max_export_batch_size; may be given "
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
        metavar="[MODE,]KEY=VALUE",
        read=trace_settings_from_flags,
    )
    log: LogSettings = flags_of(LogSettings)
    backends: BackendSettings = flags_of(BackendSettings)
    cache_bytes: int = flag(
        int,
        "bytes of responses that are stored for models with response_cache; not given: none",
        name="cache-config",
        older={"response-cache-byte-size": "local,size={}"},
        group="Response cache",
        metavar="local,size=BYTES",
        read=read_cache_config,
    )
    memory: MemoryLimits = flags_of(MemoryLimits)
    triton: TritonFlags = flags_of(TritonFlags)

    def notices(self) -> list[str]:
        """Return a log line for each given flag without effect."""
        tls = [*self.http.tls.notices(), *self.grpc.tls.notices()]
        closed = open_groups(
            self.http.restrictions if self.http.allow else None,
            self.grpc.restrictions if self.grpc.allow else None,
        )
        return [*flags_without_effect(self.triton), *tls, *self.backends.notices(), *closed]

    def __post_init__(self) -> None:
        metrics = self.metrics_endpoint
        # As in Triton, the default is the address of HTTP.
        metrics = replace(metrics, address=metrics.address or self.http.address)
        object.__setattr__(self, "metrics_endpoint", metrics)
        taken: dict[tuple[str, int], str] = {}
        for server, endpoint in (("http", self.http), ("grpc", self.grpc), ("metrics", metrics)):
            if not endpoint.allow or endpoint.port == 0:
                continue
            name = f"--{server}-port"
            other = taken.setdefault((endpoint.address, endpoint.port), name)
            if other != name:
                raise invalid_flag(name, f"a port that {other} does not use", str(endpoint.port))


def _check_port(server: str, port: int) -> None:
    if not 0 <= port <= _MAX_PORT:
        raise invalid_flag(f"--{server}-port", f"a port from 0 to {_MAX_PORT}", str(port))


def _check_pattern(server: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        name = f"--{server}-header-forward-pattern"
        raise invalid_flag(name, f"a regular expression ({error})", repr(pattern)) from error
