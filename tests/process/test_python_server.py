"""gpubridge.Server: a server from Python, which leaves nothing behind."""

import asyncio
import gc
import os
import re
import signal
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

import gpubridge
from gpubridge.develop.child_server import _Child
from gpubridge.errors import BridgeError
from tests.commands import run_command
from tests.process.forked_commands import servers_are_forked
from tests.process.gates import Gate
from tests.process.server import alive, descendants, wait_until, write_model

ADD_ONE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        print("hello from", args["model_name"])

    def execute(self, requests):
        for request in requests:
            if request.inputs()[0].as_numpy()[0] < 0:
                raise ValueError("negative")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() + 1)])
            for request in requests
        ]

    def finalize(self):
        print("bye")
"""
FAILING = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("the weights are lost")

    def execute(self, requests):
        pass
"""


@pytest.fixture(scope="module")
def models(repository):
    write_model(repository, "add_one", ADD_ONE)
    return repository


def ask(server, **settings):
    return server.infer("add_one", {"IN": np.float32([1, 2.5])}, **settings)["OUT"].tolist()


def left_in_temp(folder):
    return [path.name for path in Path(folder).iterdir()]


@pytest.fixture
def forked():
    """Have the servers of a test forked; the first test's, and those of other interpreters, are executed."""
    with servers_are_forked():
        yield


@pytest.fixture
def temp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def process_of(server):
    """The process of a server, as its log says it."""
    return int(re.search(r"gpubridge \S+, process (\d+)", server.log())[1])


def note_killed_groups(monkeypatch):
    """Note the groups that are killed, and fail where their number may be another's by then."""
    killed, kill = [], os.killpg

    def note(group, number):
        assert Path(f"/proc/{group}").exists(), "the process was reaped"
        killed.append(group)
        kill(group, number)

    monkeypatch.setattr("os.killpg", note)
    return killed


def stop_again_while_stopping(server, monkeypatch):
    """Have a handler and another thread stop a server while it is being stopped; returns the thread."""
    others = [threading.Thread(target=server.stop)]
    ends_within = server._child._ends_within

    def interrupted(seconds):
        # As in a handler: it cannot wait for the thread that it interrupts.
        server.stop()
        others[0].start()
        return ends_within(seconds)

    monkeypatch.setattr(server._child, "_ends_within", interrupted)
    return others[0]


def test_a_server_serves_for_as_long_as_its_block_runs(models, temp, monkeypatch):
    killed = note_killed_groups(monkeypatch)
    with gpubridge.Server(models) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url)
        assert ask(server) == [2, 3.5]
        assert ask(server, version=1, parameters={"note": 7}) == [2, 3.5]
        with tritonclient.http.InferenceServerClient(server.http_address) as client:
            assert client.is_model_ready("add_one")
        with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
            assert client.is_model_ready("add_one")
        assert server.metrics_address
        with pytest.raises(BridgeError, match="negative"):
            server.infer("add_one", {"IN": np.float32([-1])})
        with pytest.raises(BridgeError, match="unexpected inference input 'X'"):
            server.infer("add_one", {"X": np.float32([-1])})
        with pytest.raises(BridgeError, match="the server is running"):
            server.start()
        pid = process_of(server)
        stubs = descendants(pid)
        assert "hello from add_one" in server.log()
        other = stop_again_while_stopping(server, monkeypatch)
    other.join()
    assert stubs
    assert not any(map(alive, [pid, *stubs]))
    assert left_in_temp(temp) == []
    assert "bye" in server.log()
    server.stop()
    assert killed == [pid], "once, for as long as it was a zombie"
    with pytest.raises(BridgeError, match="needs a running server"):
        ask(server)


def test_flags_are_settings(models, forked):
    server = gpubridge.Server(
        models,
        allow_grpc=False,
        model_control_mode="explicit",
        load_model=["add_one"],
        log_verbose=1,
        id="mine",
    )
    with server:
        assert server.grpc_address == ""
        assert ask(server) == [2, 3.5]
        with tritonclient.http.InferenceServerClient(server.http_address) as client:
            assert client.get_server_metadata()["name"] == "mine"


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"http_prot": 1}, TypeError, "no setting 'http_prot'; did you mean http_port?"),
        ({"ports_file": "x"}, TypeError, "no setting 'ports_file'"),
        ({"http_port": "80"}, BridgeError, "http_port expects a value of type int, got '80'"),
        ({"http_port": 70000}, BridgeError, "--http-port expects a port from 0 to 65535"),
        ({"allow_http": 1}, BridgeError, "allow_http expects a value of type bool"),
        ({"allow_client_shm": "yes"}, BridgeError, "allow_client_shm expects a value of type bool"),
        ({"exit_timeout_secs": -1}, BridgeError, "at least 0"),
        ({"model_control_mode": "sometimes"}, BridgeError, "invalid choice: 'sometimes'"),
        ({"load_model": 7}, BridgeError, "load_model expects a value a list of texts"),
        ({"trace_config": ["level=SOMETHING"]}, BridgeError, "SOMETHING"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(models, settings, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        gpubridge.Server(models, **settings)


def test_models_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(BridgeError, match=r"expected the path of models, got .*/nowhere"):
        gpubridge.Server(tmp_path / "nowhere")
    with pytest.raises(BridgeError, match="got none"):
        gpubridge.Server([])


def test_a_model_that_does_not_load_is_an_exception_with_its_error(tmp_path, temp, forked):
    write_model(tmp_path / "models", "broken", FAILING)
    server = gpubridge.Server([tmp_path / "models" / "broken"])
    with pytest.raises(BridgeError, match="RuntimeError: the weights are lost") as raised:
        server.start()
    assert "exit code 1" in raised.value.message
    assert left_in_temp(temp) == ["models"]


def test_an_exception_in_the_block_stops_the_server(models, temp, forked):
    with pytest.raises(KeyboardInterrupt), gpubridge.Server(models) as server:  # noqa: PT012
        pid = process_of(server)
        raise KeyboardInterrupt
    assert not alive(pid)
    assert left_in_temp(temp) == []


def test_an_interrupt_while_it_starts_stops_it(models, temp, monkeypatch, forked):
    started = []

    def interrupt(child, limit):
        started.append(child._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr("gpubridge.develop.child_server._Child.wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpubridge.Server(models).start()
    assert not alive(started[0])
    assert left_in_temp(temp) == []


def test_a_start_that_takes_too_long_is_given_up(models, temp, forked):
    with pytest.raises(BridgeError, match="not ready after 0 s"):
        gpubridge.Server(models, start_timeout=0).start()
    assert left_in_temp(temp) == []


def test_nothing_waits_for_the_end_of_a_dropped_server(tmp_path, monkeypatch):
    temp, gate = tmp_path / "temp", Gate(tmp_path / "gate")
    temp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    waiting = ADD_ONE.replace('print("bye")', gate.wait)
    write_model(tmp_path / "models", "add_one", waiting)
    server = gpubridge.Server(tmp_path / "models").start()
    pid = process_of(server)
    # In a cycle: the collector finds it.
    server.itself = server
    del server
    gc.collect()
    assert alive(pid)
    gate.open()
    wait_until(lambda: not alive(pid), "the server's end")
    wait_until(lambda: left_in_temp(temp) == [], "the end of its files")


def test_a_server_that_somebody_else_has_waited_for(temp, monkeypatch):
    killed = note_killed_groups(monkeypatch)
    child = _Child(["--no-such-flag"], 0)
    os.waitpid(child._process.pid, 0)
    with pytest.raises(BridgeError, match=r"the server ended with exit code(.|\n)*no-such-flag"):
        child.wait_until_ready(None)
    child.stop()
    child.stop()
    # Servers of other tests that were dropped may end only now.
    assert child._process.pid not in killed
    assert left_in_temp(temp) == []


def test_a_handler_stops_a_server_that_is_starting(temp, monkeypatch):
    child = _Child(["--no-such-flag"], 0)
    ends_within = child._ends_within

    def interrupted(seconds):
        child.stop()
        return ends_within(seconds)

    monkeypatch.setattr(child, "_ends_within", interrupted)
    with pytest.raises(BridgeError, match="the server was stopped while it started"):
        child.wait_until_ready(None)
    assert left_in_temp(temp) == []


def test_another_thread_stops_a_server_that_is_starting(temp, monkeypatch):
    child = _Child(["--no-such-flag"], 0)
    ends_within, stops = child._ends_within, threading.Event()
    stopper = threading.Thread(target=child.stop)

    def look(seconds):
        if threading.current_thread() is stopper:
            stops.set()
        else:
            stopper.start()
            stops.wait()
        return ends_within(60)

    monkeypatch.setattr(child, "_ends_within", look)
    with pytest.raises(BridgeError, match="the server was stopped while it started"):
        child.wait_until_ready(None)
    stopper.join()
    assert left_in_temp(temp) == []


def test_a_forked_child_ends_nothing_and_the_end_of_the_interpreter_ends_the_server(models):
    printed = run_beside(
        models,
        """
        import os, sys
        child = os.fork()
        if child == 0:
            server.stop()
            del server
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
    pid = int(re.search(r", process (\d+)", printed)[1])
    assert not alive(pid)


def run_beside(models, code, check=True):
    """Run code in another interpreter with a started ``server``; returns its output."""
    program = f"""
import gpubridge, numpy as np
server = gpubridge.Server({str(models)!r}).start()
def ask():
    return server.infer("add_one", {{"IN": np.float32([1])}})["OUT"].tolist()
{textwrap.dedent(code)}
assert ask() == [2]
print(server.log())
"""
    done = run_command([sys.executable, "-c", program])
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_interpreter_takes_its_server_along(models, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    printed = run_beside(
        models,
        """
        import os, signal
        print(server.log(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    pid = int(re.search(r", process (\d+)", printed)[1])
    wait_until(lambda: not alive(pid), "the server to end")
    assert left_in_temp(tmp_path) == []


def test_it_works_inside_a_running_event_loop(models, forked):
    async def call():
        with gpubridge.Server(models) as server:
            return ask(server)

    assert asyncio.run(call()) == [2, 3.5]


def test_a_server_that_has_died_is_no_hang(models, forked):
    with gpubridge.Server(models) as server:
        os.kill(process_of(server), signal.SIGKILL)
        wait_until(lambda: not alive(process_of(server)), "the server's end")
        with pytest.raises(BridgeError, match="did not answer"):
            ask(server)


def test_importing_the_package_imports_no_server():
    code = "import gpubridge, sys; print([n for n in sys.modules if n.startswith('gpubridge.')])"
    done = run_command([sys.executable, "-c", code], check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Sever'"):
        _ = gpubridge.Sever
