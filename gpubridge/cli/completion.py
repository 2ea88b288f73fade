"""``gpubridge completion``: shell completion of the commands and their flags."""

from __future__ import annotations

import argparse
import sys

from gpubridge import cli
from gpubridge.errors import unsupported

USAGE = "SHELL"
DESCRIPTION = (
    'Print a script for shell completion of these commands: eval "$(gpubridge completion bash)". '
    "It needs the package shtab: pip install 'gpubridge[completion]'."
)

_PATHS = ("DIR", "MODEL_DIR", "REPOSITORY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


def run(options: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    try:
        import shtab  # noqa: PLC0415  (optional)
    except ImportError:
        raise unsupported(
            "the package shtab is missing: pip install 'gpubridge[completion]'"
        ) from None
    whole, triton = cli.whole_parser(), cli.command_parser("tritonserver", "tritonserver")
    (commands,) = (a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    for command in (*commands.choices.values(), triton):
        for action in command._actions:
            if action.metavar in _PATHS:
                action.complete = shtab.FILE
    for program in (whole, triton):
        sys.stdout.write(shtab.complete(program, options.shell) + "\n")
    return 0
