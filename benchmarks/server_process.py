"""The contenders of a comparison: how each is started, on which ports, and when it is ready."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpubridge.bench import server_process

_POLL_SECONDS = 0.005
# Triton starts 150 models in a minute or more.
_READY_SECONDS = 240.0


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


class ServerProcess(server_process.ServerProcess):
    """A contender that runs on 127.0.0.1, on ports that were free."""

    def __init__(
        self, contender: Contender, repository: Path, log: Path, flags: Sequence[str] = ()
    ) -> None:
        self.ports = Ports(*free_ports(3))
        self.http_port = self.ports.http
        launch = contender.launch(repository, self.ports)
        # As installed: modules are compiled once, not at each start.
        environment = dict(launch.environment) | {"PYTHONDONTWRITEBYTECODE": ""}
        command = [*launch.command, *flags]
        super().__init__(contender.name, command, log, environment, launch.directory)

    def wait_ready(self) -> float:
        """Wait for 200 from /v2/health/ready; return the seconds since the process was started.

        Raises BridgeError if the server ends, or is not ready in time; the message ends with its
        last output.
        """
        while not _is_ready(self.http_port):
            self.check_start(_READY_SECONDS)
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - self._started


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago (all held at once, so they differ)."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
