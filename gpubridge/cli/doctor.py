"""``gpubridge doctor``: checks of this machine."""

from __future__ import annotations

import argparse
import sys

from gpubridge import doctor

USAGE = ""
DESCRIPTION = (
    "Check what works on this machine, and report why the rest does not and what to do. The exit code is "
    "1 if models cannot be served here."
)


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Add the command's arguments: none."""


def run(_: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    findings = doctor.examine()
    sys.stdout.write(doctor.report(findings) + "\n")
    return doctor.exit_code(findings)
