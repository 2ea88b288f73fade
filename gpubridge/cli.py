"""The command line: flags to settings; the names are tritonserver's wherever it has one."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

import uvloop

import gpubridge
from gpubridge import bench, doctor
from gpubridge.config import GrpcConnections, HttpConnections, ServerSettings
from gpubridge.develop import command as develop
from gpubridge.errors import BridgeError
from gpubridge.flags import add_flags, boolean, from_flags
from gpubridge.telemetry.server_telemetry import (
    REPLACED_TRACE_FLAGS,
    add_telemetry_flags,
    telemetry_from_flags,
)
from gpubridge.tensor.native import require_native

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
    _open_standard_streams()
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


def _open_standard_streams() -> None:
    """Open those that whoever started this has closed: a socket of their number would get the log."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


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
    _add_serve_flags(command)
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


def _add_serve_flags(command: argparse.ArgumentParser) -> None:
    for kind in (ServerSettings, HttpConnections, GrpcConnections):
        add_flags(command, kind)
    command.add_argument(
        "--disable-auto-complete-config",
        action="store_true",
        help="models may not complete their configuration: it must be whole",
    )
    command.add_argument(
        "--strict-model-config",
        type=boolean,
        default=False,
        metavar="BOOL",
        help="the older name of --disable-auto-complete-config",
    )
    add_telemetry_flags(command)


def _serve(options: argparse.Namespace) -> int:
    require_native()
    from gpubridge.server import serve  # noqa: PLC0415  (it needs the compiled module)

    settings = from_flags(
        ServerSettings,
        options,
        http_connections=from_flags(HttpConnections, options),
        grpc_connections=from_flags(GrpcConnections, options),
        auto_complete=not (options.disable_auto_complete_config or options.strict_model_config),
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
