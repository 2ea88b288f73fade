"""`serve --debug-model`: a model's process waits for a debugger, which may take its time."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
import venv

import pytest

from tests.process.debug_client import DebugClient
from tests.process.server import running_server, wait_until, write_code_model

WAITS = re.compile(r"\[(\w+)\] waits for a debugger: attach it to (\S+)")


@pytest.fixture
def models(tmp_path):
    """A repository with one model of one process."""
    write_code_model(tmp_path, config="instance_group [{ count: 1 kind: KIND_CPU }]")
    return tmp_path


def waiting(server, count=1):
    """Wait until so many processes wait; returns their addresses by instance."""
    wait_until(lambda: len(WAITS.findall(server.log())) >= count, "a waiting process", server)
    return dict(WAITS.findall(server.log()))


def test_a_debugger_stops_a_served_model_for_as_long_as_it_likes(models):
    pytest.importorskip("debugpy")
    model = models / "m" / "1" / "model.py"
    line = model.read_text().splitlines().index('        self.said = ""') + 1
    limit = "--backend-config=python,stub-timeout-seconds=0.2"
    with running_server(models, "--debug-model", "m:0", limit, ready=False) as server:
        address = waiting(server)["m_0_0"]
        assert not server.is_ready("m")
        debugger = DebugClient(address)
        debugger.attach(str(model), line)
        wait_until(server.is_ready, "the server to be ready", server)
        answers = []
        client = threading.Thread(target=lambda: answers.append(server.ask("self.said = 7")))
        client.start()
        thread = debugger.event("stopped")["threadId"]
        frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
        assert (frame["name"], frame["line"]) == ("answer", line)
        seen = debugger.ask(
            "evaluate", expression="request.inputs()[0].name()", frameId=frame["id"]
        )
        assert seen["result"] == "'IN'"
        # Longer than any other model may take.
        time.sleep(1)
        debugger.ask("continue", threadId=thread)
        client.join(30)
        assert answers == [(200, "7")]
        debugger.close()
        assert server.stop() == 0
        assert "stub-timeout-seconds" not in server.log()


def test_each_instance_has_a_port_of_its_own(tmp_path):
    pytest.importorskip("debugpy")
    write_code_model(tmp_path, config="instance_group [{ count: 2 kind: KIND_CPU }]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with running_server(tmp_path, "--debug-model", f"m:{port}", ready=False) as server:
        addresses = waiting(server, 2)
        assert addresses == {
            "m_0_0": f"127.0.0.1:{port}",
            "m_0_1": f"127.0.0.1:{port + 1}",
        }
        # Nobody comes, and the server ends all the same.
        assert server.stop() == 0


def test_a_port_that_is_taken_is_told(models):
    pytest.importorskip("debugpy")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ("--debug-model", f"m:{port}", "--exit-on-error=false")
        with running_server(models, *flags, ready=False) as server:
            told = f"cannot listen for a debugger at 127.0.0.1:{port}"
            wait_until(lambda: told in server.log(), "the reason", server)


def test_an_interpreter_without_debugpy_is_told_what_to_do(tmp_path):
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python3"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    numpy = next(path for path in sys.path if path.endswith("site-packages"))
    for name in ("numpy", "numpy.libs"):
        subprocess.run(["ln", "-s", f"{numpy}/{name}", site], check=True)
    models = tmp_path / "models"
    write_code_model(
        models,
        config=f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{folder}" }} }}',
    )
    flags = ("--debug-model", "m", "--exit-on-error=false")
    with running_server(models, *flags, ready=False) as server:
        advice = f"{python} -m pip install debugpy"
        wait_until(lambda: advice in server.log(), "the advice", server)
        assert "cannot import debugpy" in server.log()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["m:x"], "--debug-model expects NAME or NAME:PORT, got 'm:x'"),
        (["m:70000"], "got 'm:70000'"),
        ([":1"], "got ':1'"),
        (["m", "n"], "--debug-model n: port 5678 is another model's"),
    ],
)
def test_flags_that_make_no_sense_are_refused(models, flags, said):
    words = [word for flag in flags for word in ("--debug-model", flag)]
    done = subprocess.run(
        [sys.executable, "-m", "gpubridge", "serve", "--model-repository", str(models), *words],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert said in done.stderr
