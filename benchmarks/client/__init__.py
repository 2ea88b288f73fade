"""The load client, in C++ so that it costs little beside the server; compiled when it is first needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.load import LoadFigures
from benchmarks.traffic import Traffic, write_traffic
from gpubridge.errors import BridgeError

__all__ = ["NAME", "Client"]

#: The name by which results say who sent the requests.
NAME = "benchmarks/client (C++, one thread)"

_SOURCE = Path(__file__).with_name("client.cpp")
_COMPILERS = ("c++", "g++", "clang++")


class Client:
    """Sends traffic to a server; ``folder`` keeps the program and the files of requests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = {False: _build(folder)}
        self._written: dict[int, tuple[Traffic, Path]] = {}

    def run(
        self, traffic: Traffic, port: int, connections: int, seconds: int, *, tls: bool = False
    ) -> LoadFigures:
        """Load 127.0.0.1:``port`` for some seconds; calls of gRPC through TLS if wanted.

        Raises
        ------
        BridgeError
            When an answer did not come, or was none.
        """
        kept = self._written.setdefault(
            id(traffic), (traffic, self._folder / f"traffic-{len(self._written)}")
        )[1]
        if not kept.exists():
            write_traffic(traffic, kept)
        if tls not in self._programs:
            self._programs[tls] = _build(self._folder, tls=tls)
        program, protocol = str(self._programs[tls]), traffic.protocol + "s" * tls
        command = [program, protocol, str(port), str(connections), str(seconds)]
        done = subprocess.run(
            [*command, str(kept), traffic.path],
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
        if done.returncode:
            raise BridgeError(f"the load client on port {port}: {done.stderr.strip()}")
        seen = json.loads(done.stdout)
        return LoadFigures(
            requests=seen["requests"],
            requests_per_second=seen["requests"] / seen["seconds"],
            p50_us=seen["p50_us"],
            p99_us=seen["p99_us"],
            mean_us=seen["mean_us"],
            # A stream that ends before its last response is no success, either.
            failed=seen["failed"]
            + (seen["requests"] * traffic.responses != seen["responses"] and bool(traffic.path)),
        )


def _build(folder: Path, *, tls: bool = False) -> Path:
    """Return the program, compiled for this state of its source; with OpenSSL only for TLS."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise BridgeError(
            f"the load client needs a C++ compiler: expected one of {', '.join(_COMPILERS)}"
        )
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    program = (
        Path(tempfile.gettempdir()) / f"gpubridge-bench-client-{os.getuid()}-{digest}{'-tls' * tls}"
    )
    if not program.exists():
        made = folder / "client"
        command = [compiler, "-std=c++17", "-O2", "-o", str(made), str(_SOURCE)]
        command += ["-DWITH_TLS", "-lssl", "-lcrypto"] if tls else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BridgeError(f"the load client does not compile:\n{done.stderr}")
        shutil.move(made, program)
    return program
