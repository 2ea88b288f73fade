"""A server as a child process on a node's address."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from gpubridge.errors import unavailable
from gpubridge.own_command import own_command
from gpubridge.ray.server_address import ServerAddress

_ENDPOINTS = ("http", "grpc", "metrics")
_KEPT_LINES = 20


class ServerProcess:
    """A gpubridge server with free ports, which ends with this process.

    Blocks until it is ready. Raises BridgeError with the end of its log: it does not start.
    """

    def __init__(self, repositories: Sequence[str], flags: Sequence[str], address: str) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        with tempfile.TemporaryDirectory(prefix="gpubridge-") as folder:
            ports = Path(folder) / "ports.json"
            command = [*own_command("gpubridge"), "serve"]
            command += [f"--model-repository={path}" for path in repositories]
            for endpoint in _ENDPOINTS:
                command += [f"--{endpoint}-address={address}", f"--{endpoint}-port=0"]
            command += ["--exit-with-parent", f"--ports-file={ports}"]
            # Replicas change their models one by one; who reaches the server is the cluster's matter.
            command += [
                "--model-control-mode=explicit",
                "--load-model=*",
                "--drain-delay-secs=3",
                *flags,
            ]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            self._log = threading.Thread(target=self._copy_log, daemon=True)
            self._log.start()
            self.address = self._wait_until_ready(ports)

    @property
    def process_id(self) -> int:
        """The server's process."""
        return self._process.pid

    def how_ended(self) -> str:
        """Return how the server ended, with the end of its log; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        self._log.join(1)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the server ended with {how}:\n{''.join(self._lines)}"

    def stop(self, seconds: float) -> None:
        """End the server: with SIGTERM, after so many seconds with SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.join(1)

    def _wait_until_ready(self, ports: Path) -> ServerAddress:
        while not ports.exists():
            if ended := self.how_ended():
                raise unavailable(ended)
            time.sleep(0.02)
        named = json.loads(ports.read_bytes())
        numbers = [named[endpoint]["port"] for endpoint in _ENDPOINTS]
        return ServerAddress(named["http"]["address"], *numbers)

    def _copy_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line)
                sys.stderr.write(line)
