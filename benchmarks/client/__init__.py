"""The load client, in C++ so that it costs little beside the server; compiled when it is first needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.load import LoadFigures
from benchmarks.traffic import Traffic, write_traffic
from gpubridge.bench.arrivals import Followed
from gpubridge.errors import BridgeError

__all__ = ["NAME", "Client"]

#: The name by which results say who sent the requests.
NAME = "benchmarks/client (C++, one thread)"

_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / "client.cpp", *sorted(_FOLDER.glob("*.h"))]
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
        seen = self._run(traffic, port, connections, seconds, tls=tls)
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

    def follow(
        self, traffic: Traffic, port: int, connections: int, schedule: NDArray[np.int64]
    ) -> Followed:
        """Send one request to 127.0.0.1:``port`` at each time of a schedule, in ns after the start.

        Raises
        ------
        BridgeError
            When an answer did not come, or was none.
        """
        given, taken = self._folder / "schedule", self._folder / "records"
        given.write_bytes(schedule.astype("<i8").tobytes())
        seconds = int(schedule[-1] / 1e9) + 1
        seen = self._run(traffic, port, connections, seconds, str(given), str(taken))
        meant, sendable, sent, answered = np.fromfile(taken, "<i8").reshape(-1, 4).T
        return Followed(meant, sendable, sent, answered, seen["failed"], seen["first"])

    def _run(
        self,
        traffic: Traffic,
        port: int,
        connections: int,
        seconds: int,
        *more: str,
        tls: bool = False,
    ) -> dict[str, Any]:
        """Run the program to its end; return what it printed."""
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
            [*command, str(kept), traffic.path, *more],
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
        if done.returncode:
            raise BridgeError(f"the load client on port {port}: {done.stderr.strip()}")
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen


def _build(folder: Path, *, tls: bool = False) -> Path:
    """Return the program, compiled for this state of its source; with OpenSSL only for TLS."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise BridgeError(
            f"the load client needs a C++ compiler: expected one of {', '.join(_COMPILERS)}"
        )
    source = b"".join(path.read_bytes() for path in _SOURCES)
    digest = hashlib.sha256(source).hexdigest()[:16]
    program = (
        Path(tempfile.gettempdir()) / f"gpubridge-bench-client-{os.getuid()}-{digest}{'-tls' * tls}"
    )
    if not program.exists():
        made = folder / "client"
        command = [compiler, "-std=c++17", "-O2", "-o", str(made), str(_SOURCES[0])]
        command += ["-DWITH_TLS", "-lssl", "-lcrypto"] if tls else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BridgeError(f"the load client does not compile:\n{done.stderr}")
        shutil.move(made, program)
    return program
