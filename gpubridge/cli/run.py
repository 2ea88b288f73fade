"""``gpubridge run``: one model in this process, without a server."""

from __future__ import annotations

import argparse
import bdb
import json
import pdb
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import gpubridge
from gpubridge.errors import invalid
from gpubridge.tensor.native import require_native

USAGE = "MODEL [FLAG ...]"
DESCRIPTION = (
    "Run one model in this process, without a server: load it, execute requests with the inputs, print "
    "the outputs. The exit code is 1 if anything failed."
)
_PACKAGE = str(Path(gpubridge.__file__).parent) + "/"


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error, from the first line of the model on."""
    own = _of_the_model(error.__traceback__)
    if own is None:
        # Raised by the bridge: no line of the model to show.
        return
    sys.stdout.flush()
    traceback.print_exception(type(error), error, own)


def enter_debugger(error: BaseException) -> None:
    """Print the traceback and run pdb where the error was raised."""
    print_traceback(error)
    own = _of_the_model(error.__traceback__)
    if own is not None and not isinstance(error, bdb.BdbQuit):
        pdb.post_mortem(own)


def _of_the_model(place: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of the bridge."""
    while place is not None:
        name = place.tb_frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen importlib.")):
            return place
        place = place.tb_next
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "directory",
        type=Path,
        metavar="MODEL",
        help="directory of the model, with its config.pbtxt; or a Python file with @gpubridge.model, as "
        "APP.py or APP.py:NAME",
    )
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
        help="also write an output to a file; may be given several times",
    )
    add(
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="parameter of the request, as JSON or text: sequence_id, sequence_start, sequence_end, timeout, "
        "priority, or a parameter of the model's own; may be given several times",
    )
    _add_execution_flags(parser)


def _add_execution_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repeat", type=_positive, default=1, metavar="N", help="execute N times")
    add("--batch", type=_positive, default=1, metavar="N", help="pass N requests to each execute")
    add(
        "--version",
        type=_positive,
        metavar="N",
        help="version of the model; the highest if not given",
    )
    add(
        "--model-repository",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="repository of models that this one calls; the model's own if not given",
    )
    add(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that this one calls, loaded into its own process; several times, or once "
        "as * for all",
    )
    add("--backend-directory", type=Path, metavar="DIR", help="directory of your own backends")
    add("--pdb", action="store_true", help="open the debugger where the model raises an error")
    add(
        "--gpu-fallback",
        choices=["none", "host"],
        default="none",
        help="fallback for KIND_GPU instances when no GPU is available: an error, or the host",
    )
    add(
        "--log-verbose",
        type=int,
        default=0,
        metavar="N",
        help="1 to include the engine's log lines",
    )


def run(options: argparse.Namespace) -> int:
    """Run the model; return the exit code, 1 if anything failed."""
    try:
        from gpubridge.develop.one_instance import one_model  # noqa: PLC0415
        from gpubridge.stub.crash_report import report_crashes  # noqa: PLC0415
    except ImportError:
        require_native()
        raise
    report_crashes()
    with one_model(str(options.directory)) as (directory, others):
        return _run(options, directory, others)


def _run(options: argparse.Namespace, directory: Path, others: Sequence[Path]) -> int:
    from gpubridge.develop.session import RunSettings, Session  # noqa: PLC0415
    from gpubridge.develop.settings import run_settings, run_telemetry  # noqa: PLC0415

    server = run_settings(
        directory,
        repositories=[*options.model_repository, *others],
        load_models=options.load_model,
        gpu_fallback=options.gpu_fallback,
        backend_directory=options.backend_directory,
    )
    settings = RunSettings(
        directory=directory,
        version=options.version,
        inputs=tuple(options.input),
        outputs=_output_files(options.output),
        parameters=dict(_parameter(text) for text in options.parameter),
        repeat=options.repeat,
        batch=options.batch,
    )
    telemetry = run_telemetry(options.log_verbose, reports_loads=True)
    note = enter_debugger if options.pdb else print_traceback
    # As in a server, models see an empty command line.
    given, sys.argv = sys.argv, [""]
    try:
        return Session(settings, server, telemetry, note).run()
    finally:
        sys.argv = given
        telemetry.close()


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
