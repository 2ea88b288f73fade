"""``gpubridge doctor``: checks of this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpubridge import doctor

USAGE = "[ENVIRONMENT ...]"
DESCRIPTION = (
    "Check what works on this machine, and report why the rest does not and what to do. The exit code is "
    "1 if models cannot be served here."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "environments",
        nargs="*",
        type=Path,
        metavar="ENVIRONMENT",
        help="directories of models' own Python environments: which compiled module their processes get",
    )


def run(arguments: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    findings = doctor.examine(arguments.environments)
    sys.stdout.write(doctor.report(findings) + "\n")
    return doctor.exit_code(findings)
