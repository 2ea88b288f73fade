"""HAProxy before a gRPC port, for as long as a block runs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from gpubridge.errors import BridgeError

__all__ = ["proxied"]

_CONFIGURATION = """
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port} proto h2
  default_backend server
backend server
  {backend}
  server one 127.0.0.1:{grpc_port} proto h2
"""
_START_SECONDS = 10.0


@contextlib.contextmanager
def proxied(grpc_port: int, folder: Path, backend: str) -> Iterator[int]:
    """Pass calls on to a port over HTTP/2; gives the port of the proxy.

    ``backend``: a line more for the section of that name.

    Raises
    ------
    BridgeError
        When there is no HAProxy, or it does not start.
    """
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        raise BridgeError("haproxy: expected it on PATH (apt-get install haproxy)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    configuration = folder / "haproxy.cfg"
    configuration.write_text(_CONFIGURATION.format(port=port, grpc_port=grpc_port, backend=backend))
    command = [program, "-db", "-f", str(configuration)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as proxy:
        try:
            _wait_until_it_listens(port, proxy)
            yield port
        finally:
            proxy.terminate()


def _wait_until_it_listens(port: int, proxy: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while proxy.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise BridgeError(f"haproxy did not listen on port {port} within {_START_SECONDS:.0f} s")
