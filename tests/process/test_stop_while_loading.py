"""SIGTERM and SIGINT before a server is ready: it ends with code 0, no trace in the log, nothing left."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.completing import write_completing
from tests.process.controlled import control, only
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


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("gpubridge.cli.serve", "SIGTERM"),
        ("uvloop", "SIGINT"),
        ("gpubridge.server", "SIGTERM"),
        ("gpubridge.engine.supervisor.instance", "SIGINT"),
    ],
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


def write_initializing(repository, mark):
    write_code_model(repository, "initializing", initialize=f"{mark}\n{FOR_EVER}")


def write_warming_up(repository, mark):
    folder = write_code_model(
        repository,
        "warming_up",
        config='model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value: {'
        ' data_type: TYPE_STRING dims: [1] input_data_file: "code" } } }]',
    )
    (folder / "warmup").mkdir()
    content = f"{mark}\n{FOR_EVER}".encode()
    (folder / "warmup" / "code").write_bytes(len(content).to_bytes(4, "little") + content)


LOAD = """
def load():
    try:
        pb_utils.load_model("initializing_too")
    except pb_utils.TritonModelException as error:
        print("the load ended:", error, flush=True)
self.loader = threading.Thread(target=load)
self.loader.start()
"""


@pytest.mark.parametrize("asked", ["at the start", "by a client and a model"])
def test_a_server_that_loads_models_ends_quietly(tmp_path, asked):
    models = tmp_path / "models"
    marks = {name: tmp_path / name for name in ("initializing", "completing", "warming_up")}
    codes = {name: f"open({str(mark)!r}, 'w').close()" for name, mark in marks.items()}
    write_initializing(models, codes["initializing"])
    write_completing(models, "completing", f"{codes['completing']}; {FOR_EVER}")
    write_warming_up(models, codes["warming_up"])
    explicit = []
    if asked != "at the start":
        explicit = only("asker")
        write_code_model(models, "asker")
        write_code_model(models, "initializing_too", initialize=FOR_EVER)
    with (
        ThreadPoolExecutor(3) as pool,
        running_server(models, *explicit, ready=bool(explicit)) as server,
    ):
        loads = [pool.submit(control, server, "load", name) for name in marks if explicit]
        for mark in marks.values():
            wait_until(mark.exists, "the model to sleep", server)
        if explicit:
            assert server.ask(LOAD, "asker")[0] == 200
            told = "loading: initializing_too:1"
            wait_until(lambda: told in server.log(), "the load to begin", server)
        pids = descendants(server.pid)
        assert len(pids) >= len(marks)
        assert not set().union(*map(named_memory, [server.pid, *pids]))
        assert server.stop() == 0
        wait_until(lambda: not any(map(alive, pids)), "its processes to end")
        for word in ("Traceback", "Error", "never retrieved"):
            assert word not in server.log()
        assert {load.result() for load in loads} <= {(503, "the server is stopping")}
        assert not explicit or "the load ended: Failed to load model" in server.log()
