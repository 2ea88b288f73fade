"""``tritonserver``: ``gpubridge serve`` with Triton's default addresses and abbreviated flags."""

from __future__ import annotations

import argparse
import sys

from gpubridge import cli
from gpubridge.cli import serve

USAGE = "[FLAG ...]"
DESCRIPTION = (
    "Serve the models of a repository on every address of this machine, as tritonserver does. "
    "`gpubridge serve` is the same on loopback."
)
run = serve.run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    serve.add_arguments(parser)
    parser.allow_abbrev = True
    parser.set_defaults(http_address="0.0.0.0", grpc_address="0.0.0.0")  # noqa: S104


def main() -> int:
    """Run the program ``tritonserver``; returns the exit code."""
    return cli.main(["tritonserver", *sys.argv[1:]], program="tritonserver")
