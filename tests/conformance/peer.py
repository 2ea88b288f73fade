"""Two servers over one repository: the real Triton, as the package nvidia-pytriton brings it, and gpubridge."""

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2_grpc

from tests.waits import poll

_SECONDS = 10.0
_WHERE = """
import sysconfig as s
print(s.get_path("purelib"), s.get_config_var("LIBDIR"))
"""


class Side:
    """One of the two servers; it is started again when it has died. ``close`` ends it."""

    def __init__(
        self, name: str, command: Sequence[str], variables: dict[str, str], port: int, log: Path
    ) -> None:
        self.name = name
        addresses = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
        ports = [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
        self._command = [*command, *addresses, *ports]
        self._variables = variables
        self._port = port
        self._log = log
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._variables,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        poll(lambda: self.process.poll() is not None or self._is_live(), 120.0)
        if not self._is_live():
            raise SystemExit(
                f"{self.name} did not start: {self._log.read_text(errors='replace')[-2000:]}"
            )

        # A channel of its own for each life: one whose server went away waits before it connects again.
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._port + 1}")
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _is_live(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/v2/health/ready")[0] == 200
        return False

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        seconds: float = _SECONDS,
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer; raises OSError or HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=seconds)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def revive(self) -> bool:
        """Start the server again if it has died; return whether it had."""
        if self.is_running():
            return False
        self.restart()
        return True

    def is_running(self) -> bool:
        """Return whether the server's process is there."""
        return self.process.poll() is None

    def restart(self) -> None:
        """Kill the server, and start it again."""
        self._channel.close()
        self.process.kill()
        self.process.wait()
        self._start()

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        self.process.terminate()
        try:
            self.process.wait(45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _triton(peer: Path, repository: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of Triton in an environment with nvidia-pytriton, and its variables."""
    python = peer / "venv" / "bin" / "python"
    site, libraries = subprocess.check_output([python, "-c", _WHERE], text=True).split()
    server = Path(site, "pytriton", "tritonserver")
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={server / 'backends'}",
    ]
    # Nothing else: stubs must find the packages of that environment.
    variables = {
        "HOME": os.environ.get("HOME", "/"),
        "VIRTUAL_ENV": str(peer / "venv"),
        "PATH": f"{peer / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": site,
        "LD_LIBRARY_PATH": f"{site}/nvidia_pytriton.libs:{libraries}",
    }
    return command, variables


def _six_free_ports() -> int:
    """Return the first of six ports in a row that nobody listens on; Triton takes no 0.

    Processes begin to look at different ones: a port is free until its server has started.
    """
    first = os.getpid() % 160
    for port in (18600 + 6 * ((first + step) % 160) for step in range(160)):
        with ExitStack() as stack, suppress(OSError):
            for number in range(port, port + 6):
                stack.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise SystemExit("no six free ports in a row between 18600 and 19560")


@contextmanager
def both(
    peer: Path, repository: Path, folder: Path, flags: Sequence[str]
) -> Iterator[tuple[Side, Side]]:
    """Start Triton of the environment ``peer`` and gpubridge over a repository."""
    command, variables = _triton(peer, repository)
    port = _six_free_ports()
    theirs = Side("triton", [*command, *flags], variables, port, folder / "triton.log")
    try:
        own = [sys.executable, "-m", "gpubridge", "serve", f"--model-repository={repository}"]
        ours = Side("gpubridge", [*own, *flags], {**os.environ}, port + 3, folder / "gpubridge.log")
        try:
            yield theirs, ours
        finally:
            ours.close()
    finally:
        theirs.close()
