"""A server of the benchmark's own, on loopback and free ports, ended with it."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["OwnServer"]

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LINES = 12
_SAMPLE = re.compile(r'^(\w+)\{.*?kind="(\w+)".*\} (\S+)$', re.MULTILINE)


class OwnServer:
    """``gpubridge serve`` in a process of its own; a context manager.

    Parameters
    ----------
    repository : Path
        The models.
    flags : sequence of str
        Beside those of the doors.
    """

    def __init__(self, repository: Path, flags: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "gpubridge", "serve"]
        self._command += ["--http-port=0", "--metrics-port=0", "--allow-grpc=false"]
        self._command += [f"--model-repository={repository}", *flags]
        self._folder = tempfile.TemporaryDirectory(prefix="gpubridge-bench-")
        self._log = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.http_port = self.metrics_port = 0

    def __enter__(self) -> OwnServer:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the server; its stubs are its children."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """Stop the server and remove its log; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                # Its stubs end with it.
                process.kill()
                process.wait()
        self._folder.cleanup()

    def copied(self) -> dict[str, int]:
        """Return the bytes that the bridge has copied so far, by kind, for all models."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = dict.fromkeys(("host", "h2d", "d2h", "d2d", "p2p"), 0)
        for name, kind, value in _SAMPLE.findall(page):
            if name == "gpubridge_copied_bytes_total":
                found[kind] += int(float(value))
        return found

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not (log := self._log.read_text(errors="replace")).rstrip().endswith("] ready"):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                last = "\n".join(log.splitlines()[-_LINES:])
                what = "ended" if ended else f"was not ready after {_START_SECONDS:.0f} s"
                raise BridgeError(
                    f"the benchmark's server {what}; its log:\n{last}", ErrorCode.UNAVAILABLE
                )
            time.sleep(_POLL_SECONDS)
        self.http_port, self.metrics_port = (
            int(re.findall(rf"Started {door} at \S+:(\d+)", log)[0])
            for door in ("HTTPService", "Metrics Service")
        )
