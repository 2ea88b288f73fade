"""Processes that outlive their parents: what dead stubs leave is ended, the others are only reaped."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.server import (
    Server,
    alive,
    children,
    running_server,
    state,
    wait_until,
    write_code_model,
)
from tests.process.test_stop_while_loading import IMPORTING

START = """
import json, multiprocessing, subprocess
from multiprocessing.shared_memory import SharedMemory

def start(**options):
    return subprocess.Popen(["sleep", "1000"], **options).pid

forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
forked.start()
memory = SharedMemory(create=True, size=4096)
from multiprocessing.resource_tracker import _resource_tracker
self.kept = memory
stubborn = "trap '' TERM; while :; do sleep 1; done"
grandchildren = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & setsid sleep 1001 & echo $!; wait"],
    stdout=subprocess.PIPE, start_new_session=True)
self.said = json.dumps({
    "memory": memory.name,
    "pids": [start(), start(start_new_session=True), start(env={}), forked.pid,
             _resource_tracker._pid, grandchildren.pid, int(grandchildren.stdout.readline()),
             subprocess.Popen(["sh", "-c", stubborn]).pid],
    "detached": start(start_new_session=True, env={}),
})
"""


@pytest.fixture
def started():
    """Ends what a test's model has detached."""
    pids = []
    yield pids
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def begin(server, started):
    """Have the model start processes; returns what it says of them."""
    status, said = server.ask(START)
    assert status == 200, said
    told = json.loads(said)
    started += [*told["pids"], told["detached"]]
    assert all(map(alive, started))
    assert Path("/dev/shm", told["memory"]).exists()
    return told


def is_all_gone(told):
    return not any(map(alive, told["pids"])) and not Path("/dev/shm", told["memory"]).exists()


def zombies(pid):
    return [child for child in children(pid) if state(child) == "Z"]


def test_a_stub_that_dies_keeps_its_exit_code(tmp_path):
    """Reaping orphans takes no child from other code."""
    write_code_model(tmp_path)
    with running_server(tmp_path) as server:
        for code in range(1, 4):
            assert f"It exited with code {code}." in server.ask(f"os._exit({code})")[1]
            wait_until(lambda: server.is_ready("m"), "the next stub", server)


@pytest.mark.parametrize("end", ["killed", "unloaded", "server stopped"])
def test_processes_of_a_stub_end_with_it(tmp_path, started, end):
    write_code_model(tmp_path)
    with running_server(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        told = begin(server, started)
        if end == "server stopped":
            assert server.stop() == 0
            assert is_all_gone(told)
            assert alive(told["detached"])
            return
        if end == "killed":
            os.kill(server.stubs()[0], signal.SIGKILL)
        else:
            assert server.request("POST", "/v2/repository/models/m/unload", "{}")[0] == 200
        wait_until(lambda: is_all_gone(told), "what it has started to end", server)
        # Detached on purpose: in a session of its own, without the variable. It is reaped at its end.
        assert alive(told["detached"])
        os.kill(told["detached"], signal.SIGKILL)
        wait_until(lambda: not zombies(server.pid), "no zombie to be left", server)
        if end == "killed":
            # Those of a stub that runs are left alone, with any parent.
            code = 'import subprocess; self.said = subprocess.run(["sh", "-c", '
            code += '"setsid sleep 1000 >&- & echo $!"], stdout=-1).stdout.decode()'
            pid = int(server.ask(code)[1])
            started.append(pid)
            os.kill(pid, 0)
            assert server.ask("time.sleep(6); self.said = 1") == (200, "1")
            assert alive(pid)
        assert "Traceback" not in server.log()


def in_namespace():
    """The command that runs another as process 1, here; skips where that is not allowed."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        command += ["--user", "--map-root-user"]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no PID namespace can be made: {tried.stderr.decode()}")
    return command


@contextmanager
def server_as_process_1(tmp_path):
    """A server that a shell has become, which had started a process before."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "gpubridge", "serve", str(tmp_path / "models")]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*in_namespace(), "sh", "-c", 'sleep 1000 & exec "$@"', "sh", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Server(process, tmp_path)
        wait_until(lambda: "] ready" in server.log(), "the server", server)
        server.http_url = re.search(r"HTTPService at (\S+)", server.log())[1]
        (server.pid,) = children(process.pid)
        yield server
    finally:
        process.kill()
        process.wait()


def test_as_process_1_a_server_reaps_all_and_obeys_sigterm(tmp_path):
    write_code_model(tmp_path / "models")
    with server_as_process_1(tmp_path) as server:
        assert server.ask("self.said = os.getppid()") == (200, "1")
        (before,) = (pid for pid in children(server.pid) if "sleep" in command_of(pid))
        # Orphans of a model, and one that is of no model.
        assert server.ask("for _ in range(3): os.system('sleep 0.1 &')")[0] == 200
        stub = next(pid for pid in server.stubs() if pid != before)
        os.kill(stub, signal.SIGKILL)
        wait_until(lambda: "is ready again" in server.log(), "the next stub", server)
        assert alive(before)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: len(children(server.pid)) == 1, "the others to be reaped", server)
        assert server.ask("self.said = 1") == (200, "1")
        os.kill(server.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "] stopped" in server.log()
        assert "Traceback" not in server.log()


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_process_1_obeys_sigterm_while_it_imports(tmp_path):
    code = IMPORTING.format(
        module="gpubridge.engine.supervisor.instance", number="SIGTERM", repository=str(tmp_path)
    )
    command = [*in_namespace(), sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
