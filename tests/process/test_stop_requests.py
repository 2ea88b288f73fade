"""A server serves on while balancers turn away from it, names its addresses, and ends with its parent."""

import json
import signal
import subprocess
import sys

import pytest

from tests.process.forked_commands import run_forked
from tests.process.server import alive, running_server, wait_until, write_code_model


def test_a_server_that_drains_late_serves_without_being_ready_and_keeps_anothers_ports_file(
    tmp_path,
):
    write_code_model(tmp_path / "models")
    path = tmp_path / "ports.json"
    path.write_text("that of an earlier server")
    ports = f"--ports-file={path}"
    with running_server(tmp_path / "models", ports, "--drain-delay-secs=600", own=True) as server:
        wait_until(lambda: path.read_text()[0] == "{", "the file", server)
        written = json.loads(path.read_text())
        assert written["pid"] == server.pid
        host, port = server.http_url.split(":")
        assert written["http"] == {"address": host, "port": int(port)}
        assert set(written) == {"pid", "http", "grpc", "metrics"}
        # Without TLS it has nothing to read again.
        server.process.send_signal(signal.SIGHUP)
        assert server.ask("self.said = 1") == (200, "1")
        empty = tmp_path / "empty"
        empty.mkdir()
        with running_server(empty, ports, "--allow-empty-repository=true", own=True) as new:
            assert f"there is no model in {empty}: a model is a directory" in new.log()
            wait_until(lambda: json.loads(path.read_text())["pid"] == new.pid, "its file", new)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not server.is_ready(), "the server to be not ready", server)
            answers = [server.ask(f"self.said = {i}") for i in range(3)]
            assert answers == [(200, str(i)) for i in range(3)]
            # The second signal ends the delay.
            assert server.stop() == 0
            assert "serving for 600 s more" in server.log()
            assert json.loads(path.read_text())["pid"] == new.pid
            assert new.stop() == 0
        assert not path.exists()


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
