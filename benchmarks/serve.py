"""gpubridge as a contender: run from this working tree with the interpreter of this process."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import numpy as np

from benchmarks.server_process import Launch, Ports

_PROJECT = Path(__file__).resolve().parent.parent


class Gpubridge:
    """The server of this repository."""

    name = "gpubridge"
    # Of the same version, one build is a quarter faster than another: its date tells them apart.
    python = (
        f"{platform.python_version()} ({platform.python_build()[1]}, {platform.python_compiler()}) "
        f"with numpy {np.__version__}"
    )

    def launch(self, repository: Path, ports: Ports) -> Launch:
        """Return how to serve ``repository`` on loopback."""
        command = [sys.executable, "-m", "gpubridge", "serve"]
        command += ["--model-repository", str(repository)]
        command += ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
        command += ["--metrics-port", str(ports.metrics), "--allow-client-shm=true"]
        return Launch(command, dict(os.environ), _PROJECT)
