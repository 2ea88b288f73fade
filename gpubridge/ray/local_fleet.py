"""A fleet on this machine: Ray in namespaces of its own, reached by a relay on loopback.

Ray listens on all interfaces, so that it gets a network that has only loopback; processes that are
left when the command ends, end with its process namespace.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpubridge.errors import BridgeError, unavailable
from gpubridge.own_command import own_command
from gpubridge.ray.proxy import bound_command, haproxy_binary
from gpubridge.ray.settings import FleetSettings

UNSHARE = ("unshare", "-rn", "--pid", "--fork", "--mount-proc", "--kill-child")
_ENDPOINTS = ("http", "grpc", "metrics")
_INTERFACE_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_ANSWER_SECONDS = 3700
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
LOCAL_RAY: Mapping[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "warning",
    # Tensors do not pass through Ray.
    "object_store_memory": 80_000_000,
    "_node_ip_address": "127.0.0.1",
}


def control_socket() -> Path:
    """Return the socket of this user's fleet on this machine."""
    return Path(tempfile.gettempdir()) / f"gpubridge-{os.getuid()}" / "fleet"


def ask_fleet(command: Mapping[str, Any]) -> dict[str, Any]:
    """Send a command to this user's fleet; raises BridgeError, also with the fleet's error."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(str(control_socket()))
            connection.sendall(json.dumps(command).encode() + b"\n")
            line = connection.makefile("rb").readline()
        except OSError as error:
            raise unavailable(
                "no fleet runs on this machine: start one with 'gpubridge ray up', or name a cluster "
                "with --address"
            ) from error
    answer: dict[str, Any] = json.loads(line) if line else {"error": "the fleet has ended"}
    if "error" in answer:
        raise unavailable(answer["error"])
    return answer


def run_local_fleet(application: Mapping[str, Any], say: Callable[[str], None]) -> int:
    """Run a fleet until SIGINT, SIGTERM or ``gpubridge ray down``; return the exit code.

    Raises BridgeError: another fleet runs, or this machine allows no namespaces.
    """
    require_namespaces()
    folder = control_socket().parent
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise unavailable(f"{folder} belongs to another user")
    if control_socket().exists():
        try:
            ask_fleet({"command": "status"})
        except BridgeError:
            control_socket().unlink()
        else:
            raise unavailable("a fleet runs already: 'gpubridge ray down' ends it")
    sockets = Path(tempfile.mkdtemp(prefix="gpubridge-"))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # Other nodes, if somebody adds them, have no sockets there.
    args = {**application["args"], "socket_folder": str(sockets), "proxies": "head"}
    command = [*UNSHARE, *own_command(__name__), str(control_socket())]
    try:
        with subprocess.Popen(bound_command(command), stdin=subprocess.PIPE, text=True) as inner:
            relay = _start_relay(FleetSettings.from_args(args), sockets)
            try:
                assert inner.stdin is not None
                inner.stdin.write(json.dumps({**application, "args": args}) + "\n")
                inner.stdin.flush()
                while inner.poll() is None and relay.poll() is None and not stop.wait(0.2):
                    pass
                say("stopping")
                # The end of its input stops the fleet.
                inner.stdin.close()
                return inner.wait()
            finally:
                relay.terminate()
                relay.wait()
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        control_socket().unlink(missing_ok=True)


def require_namespaces() -> None:
    """Raise BridgeError if this machine allows no namespaces."""
    try:
        subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise unavailable(
            "Ray listens on all interfaces, and this machine allows no network namespace that keeps it "
            f"from others ({reason}); use a cluster, or a container of its own"
        ) from error


def _start_relay(settings: FleetSettings, sockets: Path) -> subprocess.Popen[bytes]:
    """Start a HAProxy from this network's loopback to the sockets of the fleet's proxies."""
    lines = [
        "defaults",
        "  mode tcp",
        "  timeout connect 5s",
        "  option redispatch 1",
        "  retries 100",
    ]
    lines += [f"  timeout {side} 1h" for side in ("client", "server")]
    ports = (settings.http_port, settings.grpc_port, settings.metrics_port)
    for endpoint, port in zip(_ENDPOINTS, ports, strict=True):
        lines += [f"listen {endpoint}", f"  bind 127.0.0.1:{port}"]
        lines += [
            f"  server p{number} unix@{sockets}/{number}-{endpoint} check inter 200ms"
            for number in range(settings.proxies_per_node)
        ]
    path = sockets / "relay.cfg"
    path.write_text("\n".join(lines) + "\n")
    command = bound_command([haproxy_binary(), "-db", "-q", "-f", str(path)])
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


class _Control(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]


class _ControlHandler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, _Control)
        try:
            answer = server.answer(json.loads(self.rfile.readline()))
        except BridgeError as error:
            answer = {"error": error.message}
        except Exception as error:  # noqa: BLE001  (Ray's, while it is started again)
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _INTERFACE_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def places_text(settings: FleetSettings) -> str:
    """Return where clients on this machine reach the fleet, and how it is looked at and ended."""
    http, grpc, metrics = settings.http_port, settings.grpc_port, settings.metrics_port
    return (
        f"serving at http://localhost:{http}, gRPC localhost:{grpc}, http://localhost:{metrics}/metrics; "
        "'gpubridge ray status' shows its servers, Ctrl-C or 'gpubridge ray down' ends it"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(control: str) -> int:
    """Run the fleet within its namespaces until the input or the fleet ends; return the exit code."""
    application = json.loads(sys.stdin.readline())
    raise_loopback()
    os.environ |= ENVIRONMENT
    _say("starting Ray")
    import ray  # noqa: PLC0415  (reads the environment)
    from ray import serve  # noqa: PLC0415

    from gpubridge.ray.cluster import Fleet  # noqa: PLC0415

    ray.init(**LOCAL_RAY)
    serve.start(proxy_location="Disabled")
    fleet, down = Fleet(), threading.Event()

    def answer(command: Mapping[str, Any]) -> Mapping[str, Any]:
        if command["command"] != "down":
            return fleet.answer(command)
        down.set()
        return {}

    with _Control(control, _ControlHandler) as server:
        server.answer = answer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=_wait_for_end_of_input, args=(down,), daemon=True).start()
        try:
            fleet.deploy(application, _say)
            _say(places_text(FleetSettings.from_args(application["args"])))
            _say("ready")
            down.wait()
        except BridgeError as error:
            _say(f"error: {error.message}")
            return 1
        finally:
            serve.shutdown()
            ray.shutdown()
    return 0


def _wait_for_end_of_input(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
