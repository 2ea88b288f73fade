"""A server under measurement as a child process: started, awaited, stopped with all its stubs."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from benchmarks.failure import BenchmarkError

_POLL_SECONDS = 0.005
_READY_SECONDS = 90.0
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Command, whole environment and directory to start a server with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports on which a server listens."""

    http: int
    grpc: int
    metrics: int

    def of(self, protocol: str) -> int:
        """Return the port of "http" or "grpc"."""
        return self.grpc if protocol == "grpc" else self.http


class Contender(Protocol):
    """One of the two programs that are compared."""

    @property
    def name(self) -> str: ...

    @property
    def python(self) -> str:
        """The Python and numpy that its models run on."""
        ...

    def launch(self, repository: Path, ports: Ports) -> Launch: ...


class ServerProcess:
    """One running server on 127.0.0.1, with its output in ``log``; use as a context manager.

    Owns the process group it starts; ``close`` ends all of it.
    """

    def __init__(
        self, contender: Contender, repository: Path, log: Path, flags: Sequence[str] = ()
    ) -> None:
        self.name = contender.name
        self.ports = Ports(*_free_ports(3))
        self.http_port = self.ports.http
        self._log = log
        launch = contender.launch(repository, self.ports)
        self._launch = replace(launch, command=[*launch.command, *flags])
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self._started = time.monotonic()
            self._process = subprocess.Popen(
                list(self._launch.command),
                # As installed: modules are compiled once, not at each start.
                env=dict(self._launch.environment) | {"PYTHONDONTWRITEBYTECODE": ""},
                cwd=self._launch.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
        if self._process is None:
            message = f"{self.name} is not running: enter it as a context manager first"
            raise BenchmarkError(message)
        return self._process.pid

    def wait_ready(self) -> float:
        """Wait for 200 from /v2/health/ready; return the seconds since the process was started.

        Raises
        ------
        BenchmarkError
            If the server ends, or is not ready in time; the message ends with its last output.
        """
        while not _is_ready(self.http_port):
            self.check_alive()
            if time.monotonic() - self._started > _READY_SECONDS:
                message = f"{self.name}: not ready after {_READY_SECONDS:.0f} s\n"
                raise BenchmarkError(message + self._last_output())
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - self._started

    def check_alive(self) -> None:
        """Raise BenchmarkError with the server's last output if its process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            message = f"{self.name}: ended with exit code {code}\n"
            raise BenchmarkError(message + self._last_output())

    def close(self) -> None:
        """Stop the server as an operator would, and by force what is left of its group."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()  # to the server alone: ending its stubs is its own work
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _last_output(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago (all held at once, so they differ)."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
