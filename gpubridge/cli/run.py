"""``gpubridge run``: its flags, and what they come to."""

from __future__ import annotations

import argparse
import bdb
import json
import logging
import pdb
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import gpubridge
from gpubridge.config import ServerSettings
from gpubridge.errors import invalid
from gpubridge.telemetry.logs import LogSettings, ServerLog
from gpubridge.telemetry.machine_metrics import MachineMetrics
from gpubridge.telemetry.server_telemetry import ServerTelemetry
from gpubridge.telemetry.settings import MetricsSettings, TraceSettings
from gpubridge.telemetry.traces import Traces
from gpubridge.tensor.native import require_native

USAGE = "MODEL_DIR [FLAG ...]"
DESCRIPTION = (
    "Run one model in this process, without a server: load it, have it execute the inputs, print its "
    "outputs. The exit code is 1 when anything failed."
)
_PACKAGE = str(Path(gpubridge.__file__).parent) + "/"


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error from the model's first line on."""
    own = _of_the_model(error.__traceback__)
    if own is None:
        # The bridge's own words for what the model did; there is no line to show.
        return
    sys.stdout.flush()
    traceback.print_exception(type(error), error, own)


def enter_debugger(error: BaseException) -> None:
    """Print the traceback and open pdb where the error was raised; returns when that is left."""
    print_traceback(error)
    own = _of_the_model(error.__traceback__)
    if own is not None and not isinstance(error, bdb.BdbQuit):
        pdb.post_mortem(own)


def _of_the_model(place: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of the bridge that called the model."""
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen importlib.")):
            return place
        place = place.tb_next
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("directory", type=Path, metavar="MODEL_DIR", help="the model's, with its config.pbtxt")
    add(
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="JSON, text for an input of strings, @FILE.npy for an array, or @FILE for its bytes; "
        "once for each input",
    )
    add(
        "--output",
        action="append",
        default=[],
        metavar="NAME=@FILE.npy",
        help="write an output to a file, too; may be given several times",
    )
    add(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the request, as JSON or text: sequence_id, sequence_start, sequence_end, timeout, "
        "priority, or what the model reads; may be given several times",
    )
    add("--repeat", type=_positive, default=1, metavar="N", help="execute N times")
    add("--batch", type=_positive, default=1, metavar="N", help="give N requests to each execute")
    add("--version", type=_positive, metavar="N", help="of the model; the highest if not given")
    add(
        "--model-repository",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="where the models are that this one calls; the model's own if not given",
    )
    add(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that this one calls, loaded into a process of its own; several times, or once "
        "as * for all",
    )
    add("--backend-directory", type=Path, metavar="DIR", help="where backends of your own are")
    add("--pdb", action="store_true", help="open the debugger where the model raises an error")
    add(
        "--gpu-fallback",
        choices=["none", "host"],
        default="none",
        help="what becomes of a KIND_GPU instance without a GPU: an error, or the host",
    )
    add("--log-verbose", type=int, default=0, metavar="N", help="1 for the engine's log lines, too")


def run(options: argparse.Namespace) -> int:
    """Run the model; returns the exit code: 1 when it failed in any way."""
    try:
        from gpubridge.develop.session import RunSettings, Session  # noqa: PLC0415
    except ImportError:
        require_native()
        raise
    directory = options.directory.resolve()
    if not directory.is_dir():
        raise invalid(f"expected the directory of a model, got {options.directory}")
    settings = RunSettings(
        directory=directory,
        version=options.version,
        inputs=tuple(options.input),
        outputs=_output_files(options.output),
        parameters=dict(_parameter(text) for text in options.parameter),
        repeat=options.repeat,
        batch=options.batch,
    )
    telemetry = _telemetry(options.log_verbose)
    note = enter_debugger if options.pdb else print_traceback
    # As in a server: to a model that reads it, it is nobody's command line.
    given, sys.argv = sys.argv, [""]
    try:
        return Session(settings, _server_settings(options, directory), telemetry, note).run()
    finally:
        sys.argv = given
        telemetry.close()


def _server_settings(options: argparse.Namespace, directory: Path) -> ServerSettings:
    """Return what a server would be started with to serve the model and those that it calls."""
    repositories = [path.resolve() for path in options.model_repository]
    if directory.parent not in repositories:
        repositories.insert(0, directory.parent)
    names = [name for name in options.load_model if name != directory.name]
    return ServerSettings(
        model_repositories=tuple(repositories),
        model_control_mode="explicit",
        load_models=tuple(names) if "*" in names else (directory.name, *names),
        # Both ends of the channel are in one process: who stays awake keeps the other from working.
        backend_config={"python": {"busy-poll-us": "0"}},
        gpu_fallback=options.gpu_fallback,
        backend_directory=options.backend_directory,
    )


def _telemetry(verbose: int) -> ServerTelemetry:
    """Make what an engine tells of itself to: the model's log lines, and the engine's warnings."""
    log = ServerLog(LogSettings(verbose_level=verbose))
    if not verbose:
        for room in ("engine", "server"):
            logging.getLogger(f"gpubridge.{room}").setLevel(logging.WARNING)
    metrics = MetricsSettings(cpu=False, gpu=False)
    return ServerTelemetry(log, Traces(TraceSettings()), metrics, MachineMetrics(metrics))


def _output_files(texts: list[str]) -> dict[str, Path]:
    places = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.startswith("@") or not value.endswith(".npy"):
            raise invalid(f"--output expects NAME=@FILE.npy, got {text!r}")
        places[name] = Path(value[1:])
    return places


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise invalid(f"--parameter expects NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)
