"""SIGTERM and SIGINT before a server is ready: it ends with code 0, no trace in the log, nothing left."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.completing import write_completing
from tests.process.server import (
    alive,
    descendants,
    named_memory,
    running_server,
    wait_until,
    write_code_model,
)

FOR_EVER = "threading.Event().wait()"

# Gets a signal when it imports the module of that name, as anybody may send one.
IMPORTING = """
import importlib.abc, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Finder())
from gpubridge.cli import main
sys.exit(main(["serve", {repository!r}, "--http-port=0", "--grpc-port=0", "--metrics-port=0"]))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "module",
    ["gpubridge.cli.serve", "uvloop", "gpubridge.server", "gpubridge.engine.supervisor.instance"],
)
def test_a_server_that_still_imports_ends_quietly(tmp_path, module, number):
    code = IMPORTING.format(module=module, number=number, repository=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_server_that_looks_at_a_dead_mount_ends_quietly(tmp_path):
    """The server checks before anything else whether its directory is a model's."""
    mark = tmp_path / "mark"
    code = f"""
import os, sys, threading
stat = os.stat
def hanging(path, *rest, **named):
    if "dead" in str(path):
        # Of what runs in a thread, as of a system call that nothing ends, no signal is the end.
        open({str(mark)!r}, "w").close()
        assert threading.current_thread() is not threading.main_thread()
        threading.Event().wait()
    return stat(path, *rest, **named)
os.stat = hanging
from gpubridge.cli import main
sys.exit(main(["serve", {str(tmp_path / "dead")!r}]))
"""
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: mark.exists() or server.poll() is not None, "it to hang")
        server.terminate()
        assert server.communicate(timeout=60) == (b"", None)
        assert server.returncode == 0
    finally:
        server.kill()
        server.wait()


def initializing(repository, mark):
    write_code_model(repository, initialize=f"{mark}\n{FOR_EVER}")


def completing(repository, mark):
    write_completing(repository, "m", f"{mark}; {FOR_EVER}")


def warming_up(repository, mark):
    code = f"{mark}\n{FOR_EVER}"
    folder = write_code_model(
        repository,
        config='model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value: {'
        ' data_type: TYPE_STRING dims: [1] input_data_file: "code" } } }]',
    )
    (folder / "warmup").mkdir()
    content = code.encode()
    (folder / "warmup" / "code").write_bytes(len(content).to_bytes(4, "little") + content)


@pytest.mark.parametrize("loading", [initializing, completing, warming_up])
@pytest.mark.parametrize("asked", ["at the start", "by a client"])
def test_a_server_that_loads_a_model_ends_quietly(tmp_path, loading, asked):
    mark = tmp_path / "mark"
    loading(tmp_path / "models", f"open({str(mark)!r}, 'w').close()")
    explicit = ["--model-control-mode=explicit"] if asked == "by a client" else []
    with (
        ThreadPoolExecutor(1) as pool,
        running_server(tmp_path / "models", *explicit, ready=bool(explicit)) as server,
    ):
        load = None
        if explicit:
            load = pool.submit(server.request, "POST", "/v2/repository/models/m/load", "{}")
        wait_until(mark.exists, "the model to sleep", server)
        pids = descendants(server.pid)
        assert pids
        assert not set().union(*map(named_memory, [server.pid, *pids]))
        assert server.stop() == 0
        assert not any(map(alive, pids))
        for word in ("Traceback", "Error", "never retrieved"):
            assert word not in server.log()
        if load is not None:
            assert load.result()[0] == 503
