"""The command line: flags to settings; the names are tritonserver's wherever it has one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar, get_args

import uvloop

import gpubridge
from gpubridge import bench, doctor
from gpubridge.config import (
    GrpcConnections,
    HttpConnections,
    ModelControlMode,
    ServerSettings,
    read_debug_models,
)
from gpubridge.develop import command as develop
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.telemetry.flags import (
    REPLACED_TRACE_FLAGS,
    add_telemetry_flags,
    telemetry_from_flags,
)
from gpubridge.tensor.native import require_native

__all__ = ["main"]

_TLS = "TLS is not served: put a proxy that ends it before the server"
_REFUSED = {
    "--grpc-use-ssl": _TLS,
    "--grpc-use-ssl-mutual": _TLS,
    "--grpc-server-cert": _TLS,
    "--grpc-server-key": _TLS,
    "--grpc-root-cert": _TLS,
    "--allow-sagemaker": "SageMaker's door is not served; use HTTP",
    "--allow-vertex-ai": "Vertex AI's door is not served; use HTTP",
    "--cache-config": "the response cache is not served: every request is executed",
    "--rate-limit": "the rate limiter is not served: instances take what they can",
    **REPLACED_TRACE_FLAGS,
}
"""Flags of tritonserver that ask for what there is not: never ignored in silence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        sys.stderr.write(_unknown(unknown[0], options.flags))
        return 2
    try:
        code: int = options.run(options)
    except BridgeError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpubridge", description="Serve Triton Python backend models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=gpubridge.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "serve",
        help="serve the models of a repository",
        description="Serve the models of a repository. Flags are named as tritonserver's.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = ServerSettings(model_repositories=(Path(),))
    _add_door_flags(command, defaults)
    _add_model_flags(command)
    _add_backend_flags(command)
    _add_completion_flags(command)
    develop.add_debug_flag(command)
    _add_limit_flags(command, defaults)
    _add_connection_flags(command)
    add_telemetry_flags(command, _flag)
    command.set_defaults(run=_serve, flags=_names(command))
    command = commands.add_parser(
        "run",
        help="run one model here, without a server: breakpoints work",
        description="Run one model in this process, without a server: load it, have it execute the "
        "inputs, print its outputs. The exit code is 1 when anything failed.",
        allow_abbrev=False,
    )
    develop.add_run_flags(command)
    command.set_defaults(run=develop.run, flags=_names(command))
    command = commands.add_parser(
        "doctor",
        help="say what works on this machine, what does not, and what to do",
        description="Say what works on this machine, what does not and why, and what to do. The "
        "exit code is 1 when models cannot be served here.",
    )
    command.set_defaults(run=_doctor, flags=_names(command))
    command = commands.add_parser(
        "bench",
        help="measure on this machine what a user can see for himself",
        description="Measure on this machine.",
        allow_abbrev=False,
    )
    bench.add_bench_commands(command)
    return parser


def _names(command: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a command has."""
    return [name for name in command._option_string_actions if name.startswith("--")]


def _unknown(argument: str, flags: Sequence[str]) -> str:
    """Say what is wrong with an argument that no command has, and which may be meant."""
    flag = argument.partition("=")[0]
    reason = _REFUSED.get(flag)
    if reason is not None:
        return f"error: {flag}: {reason}\n"
    if not argument.startswith("-"):
        return f"error: expected flags only, got {argument!r}\n"
    close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists them all"
    return f"error: unknown flag {flag}{hint}\n"


def _add_door_flags(command: argparse.ArgumentParser, defaults: ServerSettings) -> None:
    add = command.add_argument
    for door in ("http", "grpc", "metrics"):
        add(
            f"--allow-{door}",
            type=_flag,
            default=True,
            metavar="BOOL",
            help=f"open the {door} door",
        )
        add(f"--{door}-address", default=getattr(defaults, f"{door}_address"), help="to listen on")
        add(
            f"--{door}-port",
            type=int,
            default=getattr(defaults, f"{door}_port"),
            help="to listen on; 0 for any free one",
        )


def _add_model_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--model-repository",
        "--model-store",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a directory with one directory per model; may be given several times",
    )
    add(
        "--model-control-mode",
        default="none",
        choices=get_args(ModelControlMode),
        help="none: every model is loaded at the start; poll: also when its files change; explicit: "
        "when a client says so",
    )
    add(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that is loaded at the start in explicit mode; may be given several times, or "
        "once as * for all",
    )
    add(
        "--repository-poll-secs",
        type=int,
        default=15,
        help="seconds between two looks at the models' files in poll mode",
    )
    add(
        "--exit-on-error",
        type=_flag,
        default=True,
        metavar="BOOL",
        help="exit when a model fails to load at the start",
    )
    add(
        "--strict-readiness",
        type=_flag,
        default=True,
        metavar="BOOL",
        help="the server is ready only when every model is",
    )


def _add_backend_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--backend-directory",
        type=Path,
        metavar="DIR",
        help="where your own backends are, as NAME/model.py; they win over those that are shipped",
    )
    add(
        "--backend-config",
        action="append",
        default=[],
        metavar="python,KEY=VALUE",
        help="a setting of the Python backend, e.g. python,stub-timeout-seconds=30",
    )
    add(
        "--gpu-fallback",
        choices=["none", "host"],
        default="none",
        help="what becomes of KIND_GPU instances without a GPU: an error, or the host",
    )


def _add_completion_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--disable-auto-complete-config",
        action="store_true",
        help="models may not complete their configuration: it must be whole",
    )
    add(
        "--strict-model-config",
        type=_flag,
        default=False,
        metavar="BOOL",
        help="the older name of --disable-auto-complete-config",
    )


def _add_limit_flags(command: argparse.ArgumentParser, defaults: ServerSettings) -> None:
    add = command.add_argument
    add(
        "--http-max-input-size",
        type=int,
        default=defaults.http_max_input_size,
        help="bytes of the largest request body",
    )
    add(
        "--grpc-max-message-size",
        type=int,
        default=defaults.grpc_max_message_size,
        help="bytes of the largest message of a gRPC request",
    )
    add(
        "--exit-timeout-secs",
        type=int,
        default=defaults.exit_timeout_secs,
        help="seconds that requests in flight and finalize get at the end",
    )
    add(
        "--request-arena-limit",
        type=int,
        default=defaults.request_arena_limit,
        help="bytes of shared memory for requests",
    )
    add(
        "--output-arena-limit",
        type=int,
        default=defaults.output_arena_limit,
        help="bytes of shared memory for the outputs of one instance",
    )
    add(
        "--allow-client-shm",
        type=_flag,
        default=defaults.allow_client_shm,
        metavar="BOOL",
        help="clients may register their system shared memory, which models then map",
    )
    add(
        "--client-shm-max-regions",
        type=int,
        default=defaults.client_shm_max_regions,
        help="how many regions of it may be registered at once",
    )


def _add_connection_flags(command: argparse.ArgumentParser) -> None:
    types: dict[type, Callable[[str], object]] = {int: int, float: float, bool: _flag, str: str}
    for kind in (HttpConnections, GrpcConnections):
        for each in fields(kind):
            command.add_argument(
                _connection_flag(kind, each.name),
                type=types[type(each.default)],
                default=each.default,
                metavar=type(each.default).__name__.upper(),
                help=each.metadata["help"],
            )


_Connections = TypeVar("_Connections", HttpConnections, GrpcConnections)


def _connections(kind: type[_Connections], options: argparse.Namespace) -> _Connections:
    """Return what the flags of `_add_connection_flags` say."""
    return kind(
        **{each.name: getattr(options, f"{kind.door}_{each.name}") for each in fields(kind)}
    )


def _connection_flag(kind: type[HttpConnections | GrpcConnections], name: str) -> str:
    return f"--{kind.door}-{name.replace('_', '-')}"


def _serve(options: argparse.Namespace) -> int:
    require_native()
    from gpubridge.server import serve  # noqa: PLC0415  (it needs the compiled module)

    settings = ServerSettings(
        model_repositories=tuple(options.model_repository),
        allow_http=options.allow_http,
        http_address=options.http_address,
        http_port=options.http_port,
        http_max_input_size=options.http_max_input_size,
        http_connections=_connections(HttpConnections, options),
        allow_grpc=options.allow_grpc,
        grpc_address=options.grpc_address,
        grpc_port=options.grpc_port,
        grpc_max_message_size=options.grpc_max_message_size,
        grpc_connections=_connections(GrpcConnections, options),
        allow_metrics=options.allow_metrics,
        metrics_address=options.metrics_address,
        metrics_port=options.metrics_port,
        model_control_mode=options.model_control_mode,
        load_models=tuple(options.load_model),
        repository_poll_secs=options.repository_poll_secs,
        exit_on_error=options.exit_on_error,
        strict_readiness=options.strict_readiness,
        exit_timeout_secs=options.exit_timeout_secs,
        backend_directory=options.backend_directory,
        auto_complete=not (options.disable_auto_complete_config or options.strict_model_config),
        backend_config=_backend_config(options.backend_config),
        gpu_fallback=options.gpu_fallback,
        request_arena_limit=options.request_arena_limit,
        output_arena_limit=options.output_arena_limit,
        allow_client_shm=options.allow_client_shm,
        client_shm_max_regions=options.client_shm_max_regions,
        debug_ports=read_debug_models(options.debug_model),
    )
    telemetry = telemetry_from_flags(options)
    try:
        return uvloop.run(serve(settings, telemetry))
    finally:
        telemetry.close()


def _doctor(_: argparse.Namespace) -> int:
    findings = doctor.examine()
    sys.stdout.write(doctor.report(findings) + "\n")
    return doctor.exit_code(findings)


def _flag(text: str) -> bool:
    value = text.lower()
    if value in ("true", "1", "on"):
        return True
    if value in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def _backend_config(entries: Sequence[str]) -> dict[str, dict[str, str]]:
    config: dict[str, dict[str, str]] = {}
    for entry in entries:
        backend, comma, pair = entry.partition(",")
        if not comma:
            # What is for every backend: there is one.
            backend, pair = "python", entry
        key, equals, value = pair.partition("=")
        if not equals:
            raise BridgeError(
                f"--backend-config expects BACKEND,KEY=VALUE, got {entry!r}", ErrorCode.INVALID_ARG
            )
        if backend != "python":
            raise BridgeError(
                f"--backend-config: expected the backend python, got {backend!r} in {entry!r}",
                ErrorCode.INVALID_ARG,
            )
        config.setdefault(backend, {})[key] = value
    return config
