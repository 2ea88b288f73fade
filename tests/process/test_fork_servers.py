"""Stubs that are forked from a process that has made their imports: each is as one that was started anew."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.process.server import (
    STARTED,
    alive,
    descendants,
    is_fork_server,
    open_files,
    running_server,
    state,
    wait_until,
    write_code_model,
)

# Not forked itself, as servers of other tests are.
SERVER = {"command": STARTED}
EXPLICIT = ("--model-control-mode=explicit",)
NAMES = [f"m{number}" for number in range(6)]
ABOUT = """
import json, numpy, random, sys
self.said = json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0),
    "mark": os.environ["GPUBRIDGE_STUB"], "words": sys.orig_argv[2:], "argv": sys.argv,
    "hash": hash("text"), "random": [random.random(), numpy.random.random()],
    "product": float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "modules": sorted(sys.modules),
    "child": signal.getsignal(signal.SIGCHLD), "seekable": sys.stdout.seekable(),
})
"""
EXIT = "os._exit(7)"


def fork_servers(server):
    return [pid for pid in descendants(server.pid) if is_fork_server(pid) and alive(pid)]


def about(server, model):
    status, answer = server.ask(f"import os, signal\n{ABOUT}", model)
    assert status == 200, answer
    return json.loads(answer)


def load(server, *names):
    for name in names:
        status, _, body = server.request("POST", f"/v2/repository/models/{name}/load")
        assert status == 200, body


@pytest.fixture
def repository(tmp_path):
    for name in NAMES:
        write_code_model(tmp_path / "models", name)
    return tmp_path / "models"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of six models, and what each says about its process."""
    repository = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_code_model(repository, name)
    with running_server(repository, **SERVER) as server:
        yield server, [about(server, name) for name in NAMES]


def forked(served):
    """Return what the forked ones say, which have one seed of hashes, and the others."""
    _, stubs = served
    hashes = [each["hash"] for each in stubs]
    return (
        [each for each in stubs if hashes.count(each["hash"]) > 1],
        [each for each in stubs if hashes.count(each["hash"]) == 1],
    )


def test_the_third_stub_and_those_after_it_are_forked(served):
    copies, others = forked(served)
    assert (len(copies), len(others)) == (4, 2)
    assert len(fork_servers(served[0])) == 1


def test_a_forked_stub_is_a_process_as_any_other(served):
    server, stubs = served
    copies, others = forked(served)
    assert len({each["pid"] for each in stubs}) == len(stubs)
    for each in stubs:
        assert each["parent"] == server.pid
        assert each["session"] == each["group"] == each["pid"]
        assert each["product"] == 300**3
        assert state(each["pid"]) in "SR"
    for name in ("argv", "blocked", "child", "seekable"):
        assert [each[name] for each in copies] == [others[0][name]] * len(copies), name
    further = set(copies[0]["modules"]) - set(others[0]["modules"])
    assert further <= {"gpubridge.stub.fork_server", "gpubridge.transport.fork_requests"}, further


def test_process_lists_show_a_forked_stub_as_others(served):
    _, stubs = served
    for name, each in zip(NAMES, stubs, strict=True):
        words = Path(f"/proc/{each['pid']}/cmdline").read_text().rstrip("\0").split("\0")
        assert words[1].endswith("bootstrap.py")
        assert words[-1] == f"{name}_0"
        assert each["words"] == words[2:]
        assert Path(f"/proc/{each['pid']}/comm").read_text() == Path("/proc/self/comm").read_text()


def test_each_has_a_mark_and_random_numbers_of_its_own(served):
    _, stubs = served
    assert len({each["mark"] for each in stubs}) == len(stubs)
    assert len({tuple(each["random"]) for each in stubs}) == len(stubs)
    assert len({each["random"][1] for each in stubs}) == len(stubs)
    for each in stubs:
        variables = Path(f"/proc/{each['pid']}/environ").read_bytes().split(b"\0")
        assert f"GPUBRIDGE_STUB={each['mark']}".encode() in variables


def test_a_forked_stub_has_no_descriptor_or_memory_that_others_lack(served):
    copies, others = forked(served)

    def kinds(pid):
        return sorted(re.sub(r"\d+", "N", target) for target in open_files(pid))

    def shared(pid):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return sorted(
            re.sub(r"\d+", "N", line.split()[-1]) for line in maps if line.split()[1][3] == "s"
        )

    for each in copies:
        assert kinds(each["pid"]) == kinds(others[0]["pid"])
        assert shared(each["pid"]) == shared(others[0]["pid"])


def test_memory_is_shared_by_forked_stubs(served):
    copies, others = forked(served)

    def proportional(pid):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss: +(\d+)", text, re.MULTILINE)[1])

    least = min(proportional(each["pid"]) for each in others)
    assert max(proportional(each["pid"]) for each in copies) < 0.8 * least


def test_the_end_of_a_forked_stub_is_reported_and_its_successor_is_not_forked(repository):
    with running_server(repository, **SERVER) as server:
        hashes = [about(server, name)["hash"] for name in NAMES]
        name = next(
            name for name, each in zip(NAMES, hashes, strict=True) if hashes.count(each) > 1
        )
        status, answer = server.ask(f"import os\n{EXIT}", name)
        assert (status, "exited with code 7" in answer) == (503, True), answer
        assert about(server, name)["hash"] not in hashes
        os.kill(about(server, name)["pid"], signal.SIGKILL)
        wait_until(lambda: "killed by signal 9" in server.log(), "its death", server)
        assert about(server, name)["hash"] not in hashes


def test_what_a_forked_stub_leaves_is_ended(repository):
    # Neither its session nor its group is that of the stub, and it never was executed.
    code = "import os\npid = os.fork()\nif not pid:\n    os.setsid()\n    time.sleep(1000)\nself.said = str(pid)"
    with running_server(repository, **SERVER) as server:
        hashes = [about(server, name)["hash"] for name in NAMES]
        name = next(
            name for name, each in zip(NAMES, hashes, strict=True) if hashes.count(each) > 1
        )
        left = int(server.ask(f"import time\n{code}", name)[1])
        assert alive(left)
        server.ask(f"import os\n{EXIT}", name)
        wait_until(lambda: not alive(left), "the process that it left to end", server)


def test_all_instances_of_a_model_wait_for_its_completed_configuration(tmp_path):
    write_code_model(tmp_path / "models", config="instance_group [{ count: 10 }]")
    with running_server(tmp_path / "models", **SERVER) as server:
        # The first instance completes it while others are being forked.
        assert fork_servers(server)
        assert "not healthy" not in server.log()
        assert len(server.stubs()) == 10


def test_nothing_is_left_of_a_killed_server(repository):
    with running_server(repository, **SERVER) as server:
        left = descendants(server.pid)
        assert fork_servers(server)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(alive, left)), "its processes to end")


def test_none_is_forked_where_that_is_switched_off(repository):
    with running_server(repository, "--fork-stubs=false", **SERVER) as server:
        assert fork_servers(server) == []
        assert len({about(server, name)["hash"] for name in NAMES}) == len(NAMES)


def test_a_killed_fork_server_is_replaced(repository):
    with running_server(repository, *EXPLICIT, **SERVER) as server:
        load(server, *NAMES[:4])
        (before,) = fork_servers(server)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not alive(before), "the fork server to end")
        load(server, *NAMES[4:])
        hashes = [about(server, name)["hash"] for name in NAMES]
        assert fork_servers(server) != [before]
        assert hashes.count(hashes[2]) == hashes.count(hashes[3]) == 2


def test_stubs_start_while_their_fork_server_is_stopped(repository):
    with running_server(repository, *EXPLICIT, **SERVER) as server:
        load(server, *NAMES[:4])
        (before,) = fork_servers(server)
        os.kill(before, signal.SIGSTOP)
        load(server, *NAMES[4:])
        assert len({about(server, name)["pid"] for name in NAMES}) == len(NAMES)
        wait_until(lambda: not alive(before), "the fork server to be killed", server)
        assert len(server.stubs()) == len(NAMES)


def test_a_stub_has_what_was_installed_after_its_fork_server_had_started(repository, tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    environment = {"PYTHONPATH": str(packages)}
    with running_server(repository, *EXPLICIT, environment=environment, **SERVER) as server:
        load(server, *NAMES[:4])
        (before,) = fork_servers(server)
        (packages / "sitecustomize.py").write_text("import os; os.environ['INSTALLED'] = 'yes'")
        load(server, *NAMES[4:])
        for name in NAMES[4:]:
            assert server.ask("import os; self.said = os.environ['INSTALLED']", name) == (
                200,
                "yes",
            )
        wait_until(lambda: before not in fork_servers(server), "the old fork server to end", server)


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()",
        "import sys; '--forks' in sys.orig_argv and sys.exit(3)",
        "import sys, time; '--forks' in sys.orig_argv and time.sleep(1e6)",
    ],
)
def test_stubs_start_where_a_fork_server_cannot(repository, tmp_path, program):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(program)
    environment = {"PYTHONPATH": str(packages)}
    with running_server(repository, environment=environment, **SERVER) as server:
        assert len({about(server, name)["hash"] for name in NAMES}) == len(NAMES)
        assert fork_servers(server) == []
        assert server.log().count("start without a fork server: it ended") == 1
