"""`serve --debug-model`: a model's process waits for a debugger, which may take its time."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import threading
import time
import venv
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.process.debug_client import DebugClient
from tests.process.forked_commands import run_forked
from tests.process.server import running_server, wait_until, write_code_model

WAITS = re.compile(r"\[(\w+)\] waits for a debugger: attach it to (\S+)")
REFUSED = "cannot listen for a debugger"


@pytest.fixture
def models(tmp_path):
    """A repository with one model of one process."""
    write_code_model(tmp_path, config="instance_group [{ count: 1 kind: KIND_CPU }]")
    return tmp_path


def waiting(server, count=1):
    """Wait until so many processes wait, or one cannot; returns the addresses by instance."""

    def known():
        log = server.log()
        return len(WAITS.findall(log)) == count or REFUSED in log

    wait_until(known, "a waiting process", server)
    return dict(WAITS.findall(server.log()))


@pytest.fixture
def pair(tmp_path):
    """A repository with one model of two processes."""
    pytest.importorskip("debugpy")
    write_code_model(tmp_path, config="instance_group [{ count: 2 kind: KIND_CPU }]")
    return tmp_path


@contextmanager
def taken(port):
    """A debugger listens at this port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


def neighbours(*, second_taken=False):
    """Try some ports that are free, as the ones after them are; the kernel gives none of them away."""
    its_own = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first, last = map(int, its_own)
    outside = [port for port in range(10_000, 65_000) if port + 1 < first or port > last]
    for port in random.sample(outside, 20):
        with suppress(OSError), ExitStack() as second:
            second.enter_context(taken(port + 1))
            with taken(port):
                pass
            if not second_taken:
                second.close()
            yield port
    pytest.fail("no two ports were free for long enough")


def test_a_debugger_stops_a_served_model_for_as_long_as_it_likes(models):
    pytest.importorskip("debugpy")
    model = models / "m" / "1" / "model.py"
    line = model.read_text().splitlines().index('        self.said = ""') + 1
    limit = "--backend-config=python,execute-timeout-seconds=0.2"
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
        client.join(150)
        assert answers == [(200, "7")]
        debugger.close()
        assert server.stop() == 0
        assert "longer than execute-timeout-seconds" not in server.log()


def test_each_instance_has_a_port_of_its_own(pair):
    for port in neighbours():
        flags = ("--debug-model", f"m:{port}", "--exit-on-error=false")
        with running_server(pair, *flags, ready=False) as server:
            addresses = waiting(server, 2)
            if REFUSED in server.log():
                continue  # Another process has taken the port.
            assert addresses == {
                "m_0_0": f"127.0.0.1:{port}",
                "m_0_1": f"127.0.0.1:{port + 1}",
            }
            # No debugger comes, and the server ends all the same.
            assert server.stop() == 0
            return


def test_why_an_instance_fails_is_told_while_another_one_waits(pair):
    for port in neighbours(second_taken=True):
        flags = ("--debug-model", f"m:{port}", "--exit-on-error=false")
        with running_server(pair, *flags, ready=False) as server:
            wait_until(lambda: REFUSED in server.log(), "the reason", server)
            lines = [line for line in server.log().splitlines() if REFUSED in line]
            if any(f"127.0.0.1:{port}:" in line for line in lines):
                continue
            assert len(lines) == 1
            assert f"127.0.0.1:{port + 1}: " in lines[0]
            assert "instance 'm_0_1' failed to start" in lines[0]
            assert "m_0_0" in lines[0], "who is waited for"
            assert "failed to load" not in server.log(), "it is still waited for"
            assert server.stop() == 0
            return


def test_a_port_that_is_taken_is_told(models):
    pytest.importorskip("debugpy")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        flags = ("--debug-model", f"m:{port}", "--exit-on-error=false")
        with running_server(models, *flags, ready=False) as server:
            told = f"cannot listen for a debugger at 127.0.0.1:{port}"
            wait_until(lambda: told in server.log(), "the reason", server)
            assert not server.is_ready("m")
            assert server.stop() == 0


def test_an_interpreter_without_debugpy_is_told_what_to_do(tmp_path):
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python3"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    numpy = Path(np.__file__).parents[1]
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
    done = run_forked("serve", str(models), *words)
    assert done.returncode == 1
    assert said in done.stderr
