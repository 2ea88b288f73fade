"""The command line: one module for each command, imported when that command is given.

Such a module has ``USAGE`` (the arguments in a line), ``DESCRIPTION``, ``add_arguments(parser)`` and
``run(options)``, which returns the exit code.
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
from gpubridge.cli.parser import Parser, UsageError
from gpubridge.errors import BridgeError

COMMANDS = {
    "serve": "serve the models of a repository, or one model",
    "tritonserver": "serve as tritonserver does: on every address of this machine",
    "init": "write a small model to begin with",
    "run": "run one model here, without a server: breakpoints work",
    "doctor": "say what works on this machine, what does not, and what to do",
    "bench": "measure on this machine what a user can see for himself",
    "completion": "print what makes a shell complete these commands",
}
"""All commands, each with its line in the help."""

_SERVERS = ("serve", "tritonserver")


def main(arguments: Sequence[str] | None = None, program: str = "") -> int:
    """Run a command, as ``program`` if that is not ``gpubridge COMMAND``; returns the exit code."""
    _open_standard_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in COMMANDS:
            with _ended_by_signals() if words[0] in _SERVERS else nullcontext():
                options = command_parser(words[0], program).parse_known(words[1:])
                code: int = _module(words[0]).run(options)
                sys.stdout.flush()
                return code
        parser = whole_parser(())
        if words:
            # Prints what it was asked for, or refuses what is no command.
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
        # Whoever read the output reads no more: what is left of it is for nobody.
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
    """Return the parser of everything; only some ``commands`` with what follows them."""
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
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGINT end the process with code 0, until a server takes them.

    As process 1 it would not hear of SIGTERM otherwise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    # No exception: wherever it were raised, in the midst of an import, it might be lost.
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open those that whoever started this has closed: a socket of their number would get the log."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _module(command: str) -> Any:
    return importlib.import_module(f"gpubridge.cli.{command}")
