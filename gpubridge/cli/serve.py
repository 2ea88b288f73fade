"""``gpubridge serve``: the server."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from gpubridge.config.backends import is_model_directory
from gpubridge.config.settings import ServerSettings, read_repository
from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import add_flags, from_flags
from gpubridge.telemetry.server_telemetry import open_telemetry
from gpubridge.tensor.native import require_native

USAGE = "[REPOSITORY ...] [FLAG ...]"
DESCRIPTION = (
    "Serve the models of a repository, a directory with one directory per model, or one model's "
    "directory, on loopback. Flags are named as tritonserver's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "repositories",
        nargs="*",
        type=read_repository,
        metavar="REPOSITORY",
        help="a model repository, or the directory of one model",
    )
    add_flags(parser, ServerSettings)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    require_native()
    import uvloop  # noqa: PLC0415  (the rest of this module serves the help, too)

    from gpubridge.server import serve  # noqa: PLC0415

    settings = server_settings(options)
    metrics = settings.metrics
    if not settings.allow_metrics:
        metrics = replace(metrics, cpu=False, gpu=False)
    telemetry = open_telemetry(settings.log, settings.traces, metrics)
    try:
        return uvloop.run(serve(settings, telemetry))
    finally:
        telemetry.close()


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """Return the settings that the arguments spell; raises BridgeError."""
    from gpubridge.engine.model_files import is_model_name  # noqa: PLC0415  (as above)

    given = [Path(os.path.abspath(path)) for path in options.repositories]  # noqa: PTH100
    models = _model_directories(given)
    for path in models:
        if not is_model_name(path.name):
            raise invalid(
                f"the directory {str(path)!a} is no model's: its name is not UTF-8, or has control "
                "characters; rename it"
            )
    repositories = [*options.model_repository, *(path for path in given if path not in models)]
    # As in Triton, one may be named twice.
    once: dict[str, Path] = {}
    for path in repositories:
        once.setdefault(os.path.abspath(path), path)  # noqa: PTH100
    options.model_repository = list(once.values())
    return from_flags(ServerSettings, options, model_directories=models)


def _model_directories(given: Sequence[Path]) -> tuple[Path, ...]:
    """Return those that are directories of single models.

    A thread looks at them, which may hang, as on a dead mount: signals are heard of meanwhile.
    """
    found: Future[tuple[Path, ...]] = Future()

    def look() -> None:
        try:
            found.set_result(tuple(filter(is_model_directory, given)))
        except (BridgeError, OSError) as error:
            found.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    return found.result()
