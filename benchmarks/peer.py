"""Triton as a contender: found in a directory that README.md says how to fill."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server_process import Launch, Ports
from gpubridge.errors import BridgeError

_VARIABLE = "GPUBRIDGE_PEER"
_QUESTIONS = (
    "import platform, sysconfig, importlib.metadata as packages;"
    "print(sysconfig.get_path('purelib'));print(sysconfig.get_config_var('LIBDIR'));"
    "print(platform.python_version(), f'({platform.python_build()[1]}, {platform.python_compiler()})',"
    "'with numpy', packages.version('numpy'))"
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A Triton installed from PyPI wheels into ``directory``/venv."""

    directory: Path
    site_packages: Path
    python_libraries: Path
    python: str
    name: str = "Triton"

    @property
    def perf_analyzer(self) -> Path | None:
        """Triton's own load generator, None where the directory holds none."""
        program = self.directory / "perf_analyzer"
        return program if os.access(program, os.X_OK) else None

    @property
    def perf_analyzer_libraries(self) -> Path:
        return self.directory / "lib"

    def launch(self, repository: Path, ports: Ports) -> Launch:
        """Return how to serve ``repository`` on loopback.

        The environment is built from nothing: the stub embeds a Python that must find the peer's
        own venv (its numpy 1), not the one that runs this benchmark.
        """
        triton = self.site_packages / "pytriton" / "tritonserver"
        venv = self.directory / "venv"
        command = [str(triton / "bin" / "tritonserver")]
        command += [f"--model-repository={repository}"]
        command += [f"--backend-directory={triton / 'backends'}"]
        command += [f"--cache-directory={triton / 'caches'}"]
        command += ["--http-address=127.0.0.1", f"--http-port={ports.http}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={ports.grpc}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={ports.metrics}"]
        libraries = [self.site_packages / "nvidia_pytriton.libs", self.python_libraries]
        environment = {
            "HOME": str(Path.home()),
            "PATH": f"{venv / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "VIRTUAL_ENV": str(venv),
            "PYTHONPATH": str(self.site_packages),
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        }
        return Launch(command, environment, self.directory)


def find_peer(directory: str | None) -> Peer | None:
    """Return the peer in ``directory``, or in $GPUBRIDGE_PEER; None if neither is given.

    Raises
    ------
    BridgeError
        If a directory is given and is not laid out as README.md says.
    """
    given = directory or os.environ.get(_VARIABLE)
    if not given:
        return None
    root = Path(given).resolve()
    interpreter = root / "venv" / "bin" / "python"
    if not interpreter.exists():
        raise BridgeError(
            f"peer directory {root}: expected venv/bin/python, found none; "
            "lay the directory out as benchmarks/README.md says"
        )
    asked = subprocess.run(
        [str(interpreter), "-c", _QUESTIONS], capture_output=True, text=True, check=False
    )
    if asked.returncode != 0:
        raise BridgeError(
            f"peer directory {root}: venv/bin/python did not answer: {asked.stderr.strip()}"
        )
    purelib, libraries, python = asked.stdout.splitlines()
    site_packages = Path(purelib)
    server = site_packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    if not os.access(server, os.X_OK):
        raise BridgeError(
            f"peer directory {root}: expected an executable {server.relative_to(root)}, found "
            "none; install nvidia-pytriton and make it executable (benchmarks/README.md)"
        )
    return Peer(root, site_packages, Path(libraries), python)
