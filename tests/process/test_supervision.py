"""Stubs that die, crash again and again, or hang: who is told what, and what goes on undisturbed."""

import json
import os
import re
import resource
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.process.controlled import control, only
from tests.process.environments import environment_parameter
from tests.process.gates import Gate
from tests.process.server import (
    NO_SPARES,
    alive,
    children,
    running_server,
    state,
    wait_until,
    write_code_model,
)

DEATHS = {
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by signal 9 (SIGKILL), sent from",
    ),
    "segfault": ("ctypes.string_at(0)", "was killed by signal 11 (SIGSEGV)"),
    "abort": ("os.abort()", "was killed by signal 6 (SIGABRT)"),
    "exit": ("os._exit(3)", "exited with code 3"),
    "deaf": ("os.closerange(3, 4096)", "exited with code 1"),
}
MODELS = ("bystander", "crash", "m", "orphans", "words", "poor", "family", *DEATHS)
HANG = "open({path!r}, 'w').close(); threading.Event().wait()"
HANG_WITH_GIL = "open({path!r}, 'w').close(); ctypes.PyDLL(None).pause()"
HANGS = {"sleeping": HANG, "holding_gil": HANG_WITH_GIL}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_code_model(repository, name)
    broken = f"if os.path.exists({str(repository / 'broken')!r}): raise RuntimeError('no licence')"
    write_code_model(repository, "looping", initialize=broken)
    return repository


@pytest.fixture(scope="module")
def server(repository):
    """One server for the tests that each hurt another model."""
    flag = "--backend-config=python,stub-timeout-seconds=1"
    with running_server(repository, flag, *only(*MODELS, "looping")) as running:
        yield running


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A server that limits the time of an execute."""
    repository = tmp_path_factory.mktemp("limited")
    for name in (*HANGS, "m"):
        write_code_model(repository, name)
    flag = "--backend-config=python,execute-timeout-seconds=1"
    with running_server(repository, flag) as running:
        yield running


@pytest.fixture
def bystander(server):
    """Proves that what a test does to its model leaves another one and its stub alone."""
    pid = stub_pid(server, "bystander")
    yield
    assert stub_pid(server, "bystander") == pid
    assert server.is_ready("bystander")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def stub_pid(server, model="m"):
    status, said = server.ask("self.said = os.getpid()", model)
    assert status == 200, said
    return int(said)


def is_down(text, instance):
    return text.startswith(f"Stub process '{instance}' is not healthy. It ")


def restarts(server, model):
    return server.metrics()[f'gpubridge_stub_restarts_total{{model="{model}",version="1"}}']


@pytest.mark.parametrize("model", DEATHS)
def test_a_death_fails_its_request_with_the_reason_and_is_repaired(server, bystander, model):
    code, how = DEATHS[model]
    with triton.InferenceServerClient(server.http_url) as client:
        tensor = triton.InferInput("IN", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([code.encode()], np.object_))
        with pytest.raises(InferenceServerException) as failed:
            client.infer(model, [tensor])
    assert failed.value.status() == "503"
    assert is_down(failed.value.message(), f"{model}_0")
    assert how in failed.value.message()
    assert failed.value.message() in server.log()
    assert server.ask("self.said = 'again'", model) == (200, "again")
    assert restarts(server, model) == 1
    assert server.is_ready()


def test_a_crash_tells_the_python_stack_whatever_became_of_standard_error(server, bystander):
    crash = "sys.stderr = None; os.close(2); ctypes.string_at(0)"
    status, said = server.ask(crash, "crash")
    assert status == 503
    first, *others = said.splitlines()
    assert re.search(r'signal 11 \(SIGSEGV\), at File ".*", line \d+ in string_at', first)
    assert any(re.search(r'called from File ".*model\.py", line \d+ in execute', e) for e in others)
    assert said in server.log()
    found = json.loads(server.request("GET", "/v2/gpubridge/status")[2])
    (model,) = (each for each in found["models"] if each["name"] == "crash")
    assert any(end["reason"] == said for end in model["instances"][0]["ends"])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.exit(5)", "SystemExit: 5"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("class Odd(BaseException): pass\nraise Odd('what')", "Odd: what"),
        (
            """
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
np.ones(1 << 40, np.uint8)
""",
            "Unable to allocate 1.00 TiB",
        ),
    ],
)
def test_any_exception_of_execute_is_an_error_and_no_death(server, code, text):
    pid = stub_pid(server)
    status, error = server.ask(code)
    assert status == 500
    assert error.startswith("Failed to process the request(s) for model 'm_0', message: ")
    assert text in error
    assert stub_pid(server) == pid


def warm_up(server, model):
    """Have the model look quick, so that its stub is fed ahead; returns its stub."""
    for _ in range(60):
        assert server.ask("pass", model)[0] == 200
    return stub_pid(server, model)


def send_in_order(server, threads, model, codes):
    """Ask each once the one before has arrived."""
    answers = []
    for code in codes:
        answers.append(threads.submit(server.ask, code, model))
        wait_until(
            lambda: server.open_requests(model) == len(answers), "a request to arrive", server
        )
    return answers


def test_requests_that_a_dead_stub_had_not_started_are_answered_by_the_next(
    server, bystander, threads, tmp_path
):
    pid = warm_up(server, "orphans")
    started, runs = tmp_path / "started", tmp_path / "runs"
    codes = [f"open({str(runs)!r}, 'a').write('{i} '); self.said = {i}" for i in range(8)]
    answers = send_in_order(server, threads, "orphans", [HANG.format(path=str(started)), *codes])
    wait_until(started.exists, "execute to start", server)
    os.kill(pid, signal.SIGKILL)
    status, error = answers[0].result()
    assert status == 503
    assert is_down(error, "orphans_0")
    assert [answer.result() for answer in answers[1:]] == [(200, str(i)) for i in range(8)]
    assert runs.read_text().split() == [str(i) for i in range(8)]


def all_at_the_stub(server, threads, path):
    """Ask four that wait at a gate, of which the third ends the stub; returns its process, the gate and the answers."""
    for attempt in count():
        pid = warm_up(server, "words")
        gate = Gate(path / f"gate{attempt}")
        codes = [
            f"{gate.wait}; self.said = 'first'",
            "self.said = 'second'",
            "os._exit(9)",
            "self.said = 'fourth'",
        ]
        answers = send_in_order(server, threads, "words", codes)
        # One slow execute of late is enough for the stub to get fewer at once.
        if not server.metrics()['gpubridge_queued_requests{model="words",version="1"}']:
            break
        gate.open()
        for each in answers:
            each.result()
    return pid, gate, answers


def test_answers_that_a_stub_gave_before_it_died_are_delivered(server, threads, tmp_path):
    pid, gate, answers = all_at_the_stub(server, threads, tmp_path)
    # The server learns all at once: two answers, a death, and that its last message was never read.
    os.kill(server.pid, signal.SIGSTOP)
    try:
        gate.open()
        wait_until(lambda: not alive(pid), "the stub to die")
    finally:
        os.kill(server.pid, signal.SIGCONT)
    first, second, (status, error), fourth = [answer.result() for answer in answers]
    assert (first, second, fourth) == ((200, "first"), (200, "second"), (200, "fourth"))
    assert status == 503
    assert error == "Stub process 'words_0' is not healthy. It exited with code 9."


def test_processes_that_a_model_left_behind_end_with_its_stub(server):
    status, child = server.ask(
        "import subprocess; self.said = subprocess.Popen(['sleep', '1000']).pid", "family"
    )
    assert status == 200
    assert alive(int(child))
    assert server.ask("os._exit(1)", "family")[0] == 503
    wait_until(lambda: not alive(int(child)), "the child to end", server)


def test_a_crash_looping_model_refuses_at_once_with_its_reason_until_it_recovers(
    server, bystander, repository
):
    broken = repository / "broken"
    broken.touch()
    assert server.ask("os._exit(1)", "looping")[0] == 503
    said = re.compile(r"instance 'looping_0' restarts in (\S+) s")
    wait_until(lambda: "0.4" in said.findall(server.log()), "some restarts", server)
    status, error = server.ask("pass", "looping")
    assert status == 503
    assert error.startswith("Request for model 'looping' cannot be served: RuntimeError: no licen")
    assert not server.is_ready("looping")
    assert not server.is_ready()
    assert server.is_ready("bystander")
    assert server.ask("self.said = 1", "bystander") == (200, "1")
    assert said.findall(server.log())[:3] == ["0.1", "0.2", "0.4"]
    broken.unlink()
    wait_until(server.is_ready, "the model to come back", server)
    assert server.ask("self.said = 'well'", "looping") == (200, "well")
    assert restarts(server, "looping") >= 4


def test_a_stub_that_cannot_be_started_for_want_of_descriptors_starts_when_there_are_some(server):
    pid = stub_pid(server, "poor")
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    # Below all that it has open: what others close meanwhile does not help.
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        os.kill(pid, signal.SIGKILL)
        failed = "instance 'poor_0' failed to start: cannot start the stub of 'poor_0': "
        wait_until(lambda: failed in server.log(), "a restart to fail", server)
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: server.is_ready("poor"), "the model to come back", server)
    assert stub_pid(server, "poor") != pid


@pytest.mark.parametrize("name", HANGS)
def test_an_execute_that_exceeds_the_time_limit_ends_and_its_stub_is_replaced(
    limited, threads, tmp_path, name
):
    warm_up(limited, name)
    mark = tmp_path / "mark"
    codes = [HANGS[name].format(path=str(mark)), "self.said = 'next'"]
    answers = send_in_order(limited, threads, name, codes)
    status, error = answers[0].result()
    assert status == 503
    assert error == (
        f"Stub process '{name}_0' is not healthy. It was killed: execute ran longer than "
        "execute-timeout-seconds=1."
    )
    assert mark.exists()
    assert answers[1].result() == (200, "next")


def test_the_time_limit_holds_for_a_stub_that_hangs_between_two_executes(limited, tmp_path):
    mark = tmp_path / "mark"
    gate = Gate(tmp_path / "gate")
    hang = f"""
def hang():
    {gate.wait}
    {HANG_WITH_GIL.format(path=str(mark))}
threading.Thread(target=hang, daemon=True).start()
"""
    assert limited.ask(hang)[0] == 200
    gate.open()
    wait_until(mark.exists, "the thread to hang", limited)
    # It has not begun, so the next stub answers it.
    assert limited.ask("self.said = 'next'") == (200, "next")
    told = "It was killed: no execute began for longer than execute-timeout-seconds=1."
    assert told in limited.log()


def test_stub_timeout_seconds_ends_no_execute_but_who_does_not_connect(
    server, repository, threads, tmp_path
):
    gate = Gate(tmp_path / "gate")
    python = tmp_path / "mute" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    # Says which version it is when asked for that, and nothing as a stub.
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -*) exec {sys.executable} "$@";; esac\nexec sleep 1000\n'
    )
    python.chmod(0o755)
    write_code_model(repository, "mute", config=environment_parameter(tmp_path / "mute"))
    slow = threads.submit(server.ask, f"{gate.wait}; self.said = 'slow'")
    status, error = control(server, "load", "mute")
    assert status == 400
    assert "It was killed: it had not connected for 10 s (stub-timeout-seconds)." in error
    gate.open()
    assert slow.result() == (200, "slow")


def resources(pid):
    """Open descriptors, threads and mapped shared memory of a process, and zombies it has left."""
    proc = Path(f"/proc/{pid}")
    maps = (proc / "maps").read_text().splitlines()
    return {
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
        "shared memory maps": sum("memfd:gpubridge" in line for line in maps),
    }


@pytest.mark.parametrize(
    ("count", "rounds"), [(2, 2), pytest.param(10, 5, marks=pytest.mark.nightly)]
)
def test_deaths_leave_nothing_behind_in_the_server(threads, tmp_path, count, rounds):
    write_code_model(tmp_path / "models", config=f"instance_group [{{ count: {count} }}]")
    die = "os.kill(os.getpid(), 9)"
    die_of_much = "#" + "x" * 1_000_000 + "\n" + die

    def use_every_stub(server):
        gate = Gate(tmp_path / "gate")
        with tempfile.TemporaryDirectory() as running:
            note = f"open(f'{running}/{{os.getpid()}}', 'w').close()"
            code = f"{note}; {gate.wait}; self.said = 1"
            answers = [threads.submit(server.ask, code) for _ in range(count)]
            wait_until(lambda: len(list(Path(running).iterdir())) == count, "all to run", server)
            gate.open()
            assert [each.result() for each in answers] == [(200, "1")] * count

    def end_every_stub(server, number):
        assert [status for status, _ in threads.map(server.ask, [die] * count)] == [503] * count
        wait_until(
            lambda: server.log().count("is ready again") == count * number, "the stubs", server
        )

    # No process more than there are instances.
    with running_server(tmp_path / "models", *NO_SPARES) as server:
        use_every_stub(server)
        first = resources(server.pid)
        assert first["shared memory maps"] > 2 * count
        for number in range(1, rounds + 1):
            end_every_stub(server, number)
        use_every_stub(server)
        # The connections of the requests may take a moment longer to close.
        wait_until(
            lambda: all(now <= first[what] for what, now in resources(server.pid).items()),
            f"the server to hold no more than {first}",
            server,
        )
        assert restarts(server, "m") == count * rounds
        assert [state(pid) for pid in children(server.pid)].count("Z") == 0
        assert len(server.stubs()) == count
        # Six such bodies fill the arena, so the memory of each has come back with its stub's death.
        for _ in range(8):
            status, error = server.ask(die_of_much)
            assert (status, error[:14]) == (503, "Stub process '")
