"""The command line: one module per command, imported when the command is used.

A module has ``USAGE`` (one line), ``DESCRIPTION``, ``add_arguments(parser)`` and ``run(options)``, which
returns the exit code.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import gpubridge
from gpubridge.cli.limits import check_limits, own_signals
from gpubridge.cli.parser import Parser, UsageError
from gpubridge.errors import BridgeError

COMMANDS = {
    "serve": "serve the models of a repository, or one model",
    "tritonserver": "serve on every address of this machine, as tritonserver does",
    "init": "write a small example model",
    "run": "run one model in this process, without a server: breakpoints work",
    "doctor": "check what works on this machine, and what to do about the rest",
    "top": "show in a terminal what a server's models do",
    "bench": "load a served model, or measure zero-copy transfers on this machine",
    "ray": "run a fleet of servers on Ray, behind a proxy",
    "completion": "print the shell completion of these commands",
}
"""All commands with their help."""

_SERVERS = ("serve", "tritonserver")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def main(arguments: Sequence[str] | None = None, program: str = "") -> int:
    """Run a command, named ``program`` in messages; return the exit code."""
    _open_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            with _server() if words[0] in _SERVERS else nullcontext():
                options = command_parser(words[0], program).parse_known(words[1:])
                code: int = _module(words[0]).run(options)
                sys.stdout.flush()
                return code
        parser = whole_parser(())
        if words:
            # Prints the help or the version, or refuses an unknown command.
            parser.refuse_unknown(words[0])
            parser.parse_args(words)
        parser.print_help()
    except UsageError as error:
        sys.stderr.write(error.text)
        return 2
    except BridgeError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe: the rest of the output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return 0


def command_parser(command: str, program: str = "") -> Parser:
    """Return the parser of a command."""
    module, program = _module(command), program or f"gpubridge {command}"
    parser = Parser(
        prog=program, usage=f"{program} {module.USAGE}".strip(), description=module.DESCRIPTION
    )
    module.add_arguments(parser)
    return parser


def whole_parser(commands: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """Return the parser of all commands, with the arguments of some ``commands``."""
    parser = Parser(
        prog="gpubridge",
        usage="gpubridge COMMAND ...",
        description="Serve Triton Python backend models.",
    )
    parser.add_argument("--version", action="version", version=gpubridge.__version__)
    choices = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for name, line in COMMANDS.items():
        of_command = [command_parser(name)] if name in commands else []
        choices.add_parser(name, help=line, parents=of_command, add_help=False)
    return parser


@contextmanager
def _server() -> Iterator[None]:
    """Exit with code 0 on SIGTERM and SIGINT until a server handles them; refuse limits without room for one.

    The kernel ignores SIGTERM for process 1 without a handler. Raises BridgeError.
    """
    check_limits()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    # No exception, which could be lost, for example in an import.
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in numbers}
    # A server has no use for OpenBLAS's threads, which spin at first. It reads the variable when NumPy is imported;
    # what stubs get is `os.environ`, which does not have it.
    os.putenv(_BLAS_THREADS, "1")
    try:
        with own_signals():
            yield
    finally:
        if _BLAS_THREADS in os.environ:
            os.putenv(_BLAS_THREADS, os.environ[_BLAS_THREADS])
        else:
            os.unsetenv(_BLAS_THREADS)
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open closed standard streams: a socket with such a number would receive log lines."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Opens the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _module(command: str) -> Any:
    return importlib.import_module(f"gpubridge.cli.{command}")
