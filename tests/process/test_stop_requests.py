"""A server serves on while balancers turn away from it, names its addresses, and ends with its parent."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.process.forked_commands import run_forked
from tests.process.server import alive, running_server, wait_until, write_code_model


def test_a_server_that_drains_late_serves_without_being_ready(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path, "--drain-delay-secs=600") as server:
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.is_ready(), "the server to be not ready", server)
        assert [server.ask(f"self.said = {i}") for i in range(3)] == [
            (200, str(i)) for i in range(3)
        ]
        # The second signal ends the delay.
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(150) == 0
        assert "serving for 600 s more" in server.log()


def test_the_ports_file_names_the_addresses_while_they_are_served(tmp_path):
    write_code_model(tmp_path / "models")
    path = tmp_path / "ports.json"
    path.write_text("that of an earlier server")
    with running_server(tmp_path / "models", f"--ports-file={path}") as server:
        wait_until(path.exists, "the file", server)
        written = json.loads(path.read_text())
        assert written["pid"] == server.pid
        host, port = server.http_url.split(":")
        assert written["http"] == {"address": host, "port": int(port)}
        assert set(written) == {"pid", "http", "grpc", "metrics"}
        assert server.stop() == 0
        assert not path.exists()


def test_the_ports_file_of_another_server_stays(tmp_path):
    write_code_model(tmp_path / "models")
    path = tmp_path / "ports.json"
    with running_server(tmp_path / "models", f"--ports-file={path}") as old:
        wait_until(path.exists, "the file", old)
        with running_server(tmp_path / "models", f"--ports-file={path}") as new:
            wait_until(lambda: json.loads(path.read_text())["pid"] == new.pid, "the new file", new)
            assert old.stop() == 0
            assert json.loads(path.read_text())["pid"] == new.pid


def test_a_server_without_tls_goes_on_after_sighup(tmp_path):
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.ask("self.said = 1") == (200, "1")
        assert server.stop() == 0


def test_a_slow_reader_does_not_keep_the_server(tmp_path):
    """Bytes that a client still reads after the exit timeout are given up."""
    write_code_model(tmp_path)
    code = "self.said = 'x' * (60 << 20)"
    body = json.dumps(
        {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [code]}]}
    ).encode()
    with running_server(tmp_path, "--exit-timeout-secs=1") as server:
        host, port = server.http_url.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            got = len(client.recv(1 << 16))
            server.process.send_signal(signal.SIGTERM)
            while server.process.poll() is None:
                got += len(client.recv(1 << 16))
                time.sleep(0.01)
            with contextlib.suppress(ConnectionResetError):
                while data := client.recv(1 << 20):
                    got += len(data)
            assert got < 60 << 20
        assert server.process.wait(150) == 0


def test_a_ports_file_that_cannot_be_written_says_so(tmp_path):
    write_code_model(tmp_path / "models")
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    ports.append(f"--ports-file={tmp_path / 'absent' / 'ports.json'}")
    done = run_forked("serve", str(tmp_path / "models"), *ports)
    assert done.returncode == 1
    assert "--ports-file cannot be written: [Errno 2]" in done.stderr + done.stdout


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_parent(tmp_path, number):
    write_code_model(tmp_path / "models")
    path = tmp_path / "ports.json"
    command = [sys.executable, "-m", "gpubridge", "serve", str(tmp_path / "models")]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--ports-file={path}"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command, *ports, "--exit-with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        with parent:
            pid = int(parent.stdout.readline())
            wait_until(path.exists, "the server to be ready")
            parent.send_signal(number)
    wait_until(lambda: not alive(pid), "the server to end")
    assert not path.exists()
    assert "has ended" in (tmp_path / "log").read_text()
