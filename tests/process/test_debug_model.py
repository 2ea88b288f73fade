"""`serve --debug-model`: a model's process waits for a debugger, which may take its time."""

import random
import re
import socket
import threading
import time
import venv
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.process.debug_client import DebugClient
from tests.process.environments import environment_parameter
from tests.process.forked_commands import run_forked
from tests.process.server import running_server, wait_until, write_code_model

WAITS = re.compile(r"\[(\w+)\] waits for a debugger: attach it to (\S+)")
LIMIT = "--backend-config=python,execute-timeout-seconds=0.2"


@contextmanager
def free_ports(count, taken):
    """Give the first of some ports in a row; a debugger listens at as many of the last ones as are taken.

    The kernel gives none of them away.
    """
    its_own = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    first, last = map(int, its_own)
    outside = [port for port in range(10_000, 65_000) if port + count < first or port > last]
    for port in random.sample(outside, 20):
        with ExitStack() as stack:
            listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
            try:
                for number, listener in enumerate(listeners):
                    listener.bind(("127.0.0.1", port + number))
                    listener.listen()
            except OSError:
                continue
            for listener in listeners[: count - taken]:
                listener.close()
            yield port
            return
    pytest.fail("no ports in a row were free")


def environment_without_debugpy(folder):
    """Make an environment that has NumPy alone; returns its interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    for name in ("numpy", "numpy.libs"):
        (site / name).symlink_to(Path(np.__file__).parents[1] / name)
    return folder / "bin" / "python3"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def debugged(models, tmp_path_factory):
    """A server whose models wait for debuggers, the port of one, with a taken one behind it, and an interpreter."""
    pytest.importorskip("debugpy")
    bare = environment_without_debugpy(tmp_path_factory.mktemp("bare") / "env")
    for name, count in (("m", 1), ("pair", 2)):
        config = f"instance_group [{{ count: {count} kind: KIND_CPU }}]"
        write_code_model(models, name, config=config)
    write_code_model(models, "bare", config=environment_parameter(bare.parents[1]))
    with free_ports(2, taken=1) as port:
        flags = [f"--debug-model={each}" for each in ("m:0", f"pair:{port}", "bare")]
        with running_server(models, *flags, LIMIT, "--exit-on-error=false", ready=False) as server:
            yield server, port, bare
            # No other debugger comes, and the server ends all the same.
            assert server.stop() == 0


def waiting(server, *instances):
    """Wait until these instances wait for a debugger; returns the addresses by instance."""
    wait_until(
        lambda: set(instances) <= dict(WAITS.findall(server.log())).keys(), "them to wait", server
    )
    return dict(WAITS.findall(server.log()))


def test_a_debugger_stops_a_served_model_for_as_long_as_it_likes(debugged, models):
    server, _, _ = debugged
    model = models / "m" / "1" / "model.py"
    line = model.read_text().splitlines().index('        self.said = ""') + 1
    address = waiting(server, "m_0_0")["m_0_0"]
    assert not server.is_ready("m")
    debugger = DebugClient(address)
    debugger.attach(str(model), line)
    wait_until(lambda: server.is_ready("m"), "the model to be ready", server)
    answers = []
    client = threading.Thread(target=lambda: answers.append(server.ask("self.said = 7")))
    client.start()
    thread = debugger.event("stopped")["threadId"]
    frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("answer", line)
    seen = debugger.ask("evaluate", expression="request.inputs()[0].name()", frameId=frame["id"])
    assert seen["result"] == "'IN'"
    # Longer than any other model may take.
    time.sleep(1)
    debugger.ask("continue", threadId=thread)
    client.join(150)
    assert answers == [(200, "7")]
    debugger.close()
    assert "longer than execute-timeout-seconds" not in server.log()


def test_each_instance_has_a_port_and_why_one_fails_is_told_while_another_one_waits(debugged):
    server, port, _ = debugged
    assert waiting(server, "pair_0_0")["pair_0_0"] == f"127.0.0.1:{port}"
    told = f"cannot listen for a debugger at 127.0.0.1:{port + 1}: "
    wait_until(lambda: told in server.log(), "the reason", server)
    (line,) = (line for line in server.log().splitlines() if told in line)
    assert "instance 'pair_0_1' failed to start" in line
    assert "pair_0_0" in line, "who is waited for"
    assert "failed to load 'pair'" not in server.log(), "it is still waited for"
    assert not server.is_ready("pair")


def test_an_interpreter_without_debugpy_is_told_what_to_do(debugged):
    server, _, python = debugged
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
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, said):
    words = [word for flag in flags for word in ("--debug-model", flag)]
    done = run_forked("serve", str(tmp_path), *words)
    assert done.returncode == 1
    assert said in done.stderr
