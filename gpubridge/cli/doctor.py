"""``gpubridge doctor``: what works on this machine."""

from __future__ import annotations

import argparse
import sys

from gpubridge import doctor

USAGE = ""
DESCRIPTION = (
    "Say what works on this machine, what does not and why, and what to do. The exit code is 1 when "
    "models cannot be served here."
)


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Add the command's arguments: none."""


def run(_: argparse.Namespace) -> int:
    """Report; returns the exit code."""
    findings = doctor.examine()
    sys.stdout.write(doctor.report(findings) + "\n")
    return doctor.exit_code(findings)
