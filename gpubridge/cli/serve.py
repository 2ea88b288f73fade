"""``gpubridge serve``: the server."""

from __future__ import annotations

import argparse
import gc
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from gpubridge.config.backends import is_model_directory
from gpubridge.config.remote_url import RemoteUrl
from gpubridge.config.settings import RepositorySettings, ServerSettings, read_repository
from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import add_flags, from_flags
from gpubridge.tensor.native import require_native

USAGE = "[REPOSITORY ...] [FLAG ...]"
DESCRIPTION = (
    "Serve the models of a repository, a directory with one directory per model, one model's "
    "directory, or a Python file with @gpubridge.model, on loopback. Flags are named as tritonserver's."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "repositories",
        nargs="*",
        type=read_repository,
        metavar="REPOSITORY",
        help="a model repository (a directory or URL), the directory of one model, or a Python file "
        "with models, APP.py or APP.py:NAME,NAME",
    )
    add_flags(parser, ServerSettings)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    # Before the imports, which take long enough for a parent process to end meanwhile.
    parent = os.getppid()
    require_native()
    gc.disable()
    import uvloop  # noqa: PLC0415  (not needed for the help)

    from gpubridge.dataplane import limit_heap  # noqa: PLC0415
    from gpubridge.engine.repository.one_file import OneFileModels  # noqa: PLC0415
    from gpubridge.server import serve  # noqa: PLC0415
    from gpubridge.telemetry.server_telemetry import open_telemetry  # noqa: PLC0415

    # What was imported stays: a collection that searched it would stop all requests for tens of milliseconds.
    gc.freeze()
    gc.enable()
    # Before threads start, which would get heaps of their own.
    limit_heap()
    files = OneFileModels()
    try:
        settings = server_settings(options, files.directories)
        metrics = settings.metrics
        if not settings.metrics_endpoint.allow:
            metrics = replace(metrics, cpu=False, gpu=False)
        telemetry = open_telemetry(settings.log, settings.traces, metrics)
        try:
            return uvloop.run(serve(settings, telemetry, parent))
        finally:
            telemetry.close()
    finally:
        files.close()


def server_settings(
    options: argparse.Namespace, of_file: Callable[[str], Sequence[Path]] = lambda _: ()
) -> ServerSettings:
    """Return the settings of the arguments; raises BridgeError.

    ``of_file``: returns the directories of the models that a Python file declares.
    """
    from gpubridge.engine.repository.model_files import is_model_name  # noqa: PLC0415  (as above)

    given: list[Path | RemoteUrl] = []
    for path in options.repositories:
        given += of_file(str(path)) or [_absolute(path)]
    models = _model_directories([path for path in given if isinstance(path, Path)])
    for path in models:
        if not is_model_name(path.name):
            raise invalid(
                f"the directory {str(path)!a} cannot be a model: its name is not UTF-8, or has control "
                "characters; rename it"
            )
    repositories = [*options.model_repository, *(path for path in given if path not in models)]
    # As in Triton, one may be named twice.
    once: dict[Path | RemoteUrl, Path | RemoteUrl] = {}
    for path in repositories:
        once.setdefault(_absolute(path), path)
    options.model_repository = list(once.values())
    repository = from_flags(RepositorySettings, options, model_directories=models)
    return from_flags(ServerSettings, options, repository=repository)


def _absolute(path: Path | RemoteUrl) -> Path | RemoteUrl:
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path  # noqa: PTH100


def _model_directories(given: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories that are single models.

    Checked in a thread, because a dead mount may block and signals must still be handled.
    """
    found: Future[tuple[Path, ...]] = Future()

    def look() -> None:
        try:
            found.set_result(tuple(filter(is_model_directory, given)))
        except (BridgeError, OSError) as error:
            found.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    return found.result()
