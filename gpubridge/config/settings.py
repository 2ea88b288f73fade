"""What the command line decides, as validated values.

Field names follow tritonserver's flags (``--http-port`` is ``http_port``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gpubridge.config.connections import GrpcConnections, HttpConnections
from gpubridge.config.normalise import GpuFallback
from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["ModelControlMode", "ServerSettings"]

ModelControlMode = Literal["none", "poll", "explicit"]

_MIB = 1024 * 1024
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that is fixed when the server starts.

    Sizes are bytes, times are seconds. Port 0 lets the system choose a free one.

    Attributes
    ----------
    model_repositories : tuple of Path
        At least one.
    load_models : tuple of str
        Loaded at the start in ``"explicit"`` mode; ``"*"``, alone, stands for all.
    repository_poll_secs : int
        How often the models' files are looked at in ``"poll"`` mode.
    backend_directory : Path or None
        Holds backends that are written in Python, ``NAME/model.py``; they win over shipped ones.
    backend_config : dict
        ``--backend-config=BACKEND,KEY=VALUE`` as ``{BACKEND: {KEY: VALUE}}``.
    gpu_fallback : {"none", "host"}
        What becomes of KIND_GPU instances on a machine without a GPU.
    http_max_input_size : int
        The largest body of an HTTP request.
    grpc_max_message_size : int
        The largest message of a gRPC request.
    http_connections, grpc_connections : HttpConnections, GrpcConnections
        What their clients' connections may cost.
    allow_client_shm : bool
        Clients may have their own shared memory mapped by the models' processes.
    client_shm_max_regions : int
        How many regions of such memory may be registered at once.
    debug_ports : mapping of str to int
        The models whose processes wait for a debugger, and where.
    auto_complete : bool
        Models may complete their own configuration.
    stub_python : Path
        The interpreter that runs models which do not name one.
    request_arena_limit : int
        The most host memory that waiting and running requests may hold, for the whole server.
    output_arena_limit : int
        The most host memory that unsent outputs may hold, for each stub.

    Raises
    ------
    BridgeError
        ``INVALID_ARG``: names the flag, what it expects and what it got.
    """

    model_repositories: tuple[Path, ...]
    allow_http: bool = True
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    http_max_input_size: int = 64 * _MIB
    http_connections: HttpConnections = field(default_factory=HttpConnections)
    allow_grpc: bool = True
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    grpc_max_message_size: int = 2**31 - 1
    grpc_connections: GrpcConnections = field(default_factory=GrpcConnections)
    allow_metrics: bool = True
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    model_control_mode: ModelControlMode = "none"
    load_models: tuple[str, ...] = ()
    repository_poll_secs: int = 15
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout_secs: int = 30
    auto_complete: bool = True
    backend_directory: Path | None = None
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gpu_fallback: GpuFallback = "none"
    stub_python: Path = field(default_factory=lambda: Path(sys.executable))
    request_arena_limit: int = 1024 * _MIB
    output_arena_limit: int = 1024 * _MIB
    allow_client_shm: bool = False
    client_shm_max_regions: int = 1024
    debug_ports: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_ports()
        if self.backend_directory is not None and not self.backend_directory.is_dir():
            raise _invalid("--backend-directory", "a directory", str(self.backend_directory))
        if not self.model_repositories:
            raise _invalid("--model-repository", "at least one directory", "none")
        if self.load_models and self.model_control_mode != "explicit":
            raise BridgeError(
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' "
                "as well.",
                ErrorCode.INVALID_ARG,
            )
        if "*" in self.load_models and len(self.load_models) > 1:
            raise BridgeError(
                "Wildcard model name '*' must be the ONLY startup model if specified at all.",
                ErrorCode.INVALID_ARG,
            )

    def _check_choices(self) -> None:
        for name, choices in (
            ("model_control_mode", get_args(ModelControlMode)),
            ("gpu_fallback", get_args(GpuFallback)),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise _invalid(_flag(name), f"one of {', '.join(choices)}", repr(value))

    def _check_numbers(self) -> None:
        for name, least in (
            ("http_max_input_size", 1),
            ("grpc_max_message_size", 1),
            ("exit_timeout_secs", 0),
            ("repository_poll_secs", 1),
            ("request_arena_limit", 1),
            ("output_arena_limit", 1),
            ("client_shm_max_regions", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise _invalid(_flag(name), f"an integer of at least {least}", str(value))

    def _check_ports(self) -> None:
        taken: dict[tuple[str, int], str] = {}
        for door in ("http", "grpc", "metrics"):
            port, flag = getattr(self, f"{door}_port"), f"--{door}-port"
            if not 0 <= port <= _MAX_PORT:
                raise _invalid(flag, f"a port from 0 to {_MAX_PORT}", str(port))
            if not getattr(self, f"allow_{door}") or port == 0:
                continue
            other = taken.setdefault((getattr(self, f"{door}_address"), port), flag)
            if other != flag:
                raise _invalid(flag, f"a port that {other} does not use", str(port))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _invalid(flag: str, expected: str, got: str) -> BridgeError:
    return BridgeError(f"{flag} expects {expected}, got {got}", ErrorCode.INVALID_ARG)
