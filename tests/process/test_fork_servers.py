"""Stubs that are forked from a process that has made their imports: each is as one that was started anew."""

import json
import mmap
import os
import re
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.process.environments import borrowing_environment, environment_parameter
from tests.process.forked_server import PLAIN
from tests.process.server import (
    alive,
    descendants,
    is_fork_server,
    named_memory,
    open_files,
    running_server,
    state,
    wait_until,
    write_code_model,
)

PLAINLY = {"environment": {PLAIN: "1"}}
EXPLICIT = "--model-control-mode=explicit"
NAMES = [f"m{number}" for number in range(4)]
MORE = ("ended", "leaver")
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
FAILING = {
    "threads": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
    "exits": "import sys; '--forks' in sys.orig_argv and sys.exit(3)",
    "hangs": "import signal, sys; '--forks' in sys.orig_argv and signal.pause()",
}
ENVIRONMENTS = ("lost", "stopped", *FAILING)


def fork_servers(server, environment=""):
    """Process ids of its fork servers; with an environment's name, of those for it."""
    return [
        pid
        for pid in descendants(server.pid)
        if is_fork_server(pid) and alive(pid) and environment in environment_of(pid)
    ]


def environment_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((each for each in variables if each.startswith("VIRTUAL_ENV=")), "VIRTUAL_ENV=")


def about(server, model):
    status, answer = server.ask(f"import os, signal\n{ABOUT}", model)
    assert status == 200, answer
    return json.loads(answer)


def load(server, *names):
    for name in names:
        status, _, body = server.request("POST", f"/v2/repository/models/{name}/load")
        assert status == 200, body


def write_environment(folder):
    """Make an environment that is ours, with a folder for packages of its own."""
    (folder / "packages").mkdir(parents=True)
    (folder / "bin").mkdir()
    python = f'#!/bin/sh\nPYTHONPATH={folder}/packages exec "{sys.executable}" "$@"\n'
    for path, text in borrowing_environment(python3=python).items():
        (folder / path).write_bytes(text)
        (folder / path).chmod(0o755)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Models of the usual environment, and five of each other one."""
    root = tmp_path_factory.mktemp("fork_servers")
    for name in (*NAMES, *MORE, *BUSY):
        write_code_model(root / "models", name)
    write_code_model(root / "models", "many", config="instance_group [{ count: 5 }]")
    for environment in ENVIRONMENTS:
        write_environment(root / environment)
        for number in range(5):
            config = environment_parameter(root / environment)
            write_code_model(root / "models", f"{environment}{number}", config=config)
    return root / "models"


@pytest.fixture(scope="module")
def server(repository):
    with running_server(repository, EXPLICIT, **PLAINLY) as running:
        load(running, *NAMES)
        yield running


@pytest.fixture(scope="module")
def served(server):
    """The server, and what each of the four models that it loaded first says about its process."""
    return server, [about(server, name) for name in NAMES]


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
    assert (len(copies), len(others)) == (2, 2)
    usual = environment_of(copies[0]["pid"])
    assert len([pid for pid in fork_servers(served[0]) if environment_of(pid) == usual]) == 1


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


def test_the_end_of_a_forked_stub_is_reported_and_its_successor_is_not_forked(served):
    server, stubs = served
    load(server, "ended")
    assert about(server, "ended")["hash"] == stubs[-1]["hash"]
    status, answer = server.ask(f"import os\n{EXIT}", "ended")
    assert (status, "exited with code 7" in answer) == (503, True), answer
    after = about(server, "ended")
    assert after["hash"] != stubs[-1]["hash"]
    os.kill(after["pid"], signal.SIGKILL)
    wait_until(lambda: "killed by signal 9" in server.log(), "its death", server)
    assert about(server, "ended")["hash"] not in (after["hash"], stubs[-1]["hash"])


def test_what_a_forked_stub_leaves_is_ended(served):
    # Neither its session nor its group is that of the stub, and it never was executed.
    code = "import os\npid = os.fork()\nif not pid:\n    os.setsid()\n    signal.pause()\nself.said = str(pid)"
    server, stubs = served
    load(server, "leaver")
    assert about(server, "leaver")["hash"] == stubs[-1]["hash"]
    left = int(server.ask(f"import signal\n{code}", "leaver")[1])
    assert alive(left)
    server.ask(f"import os\n{EXIT}", "leaver")
    wait_until(lambda: not alive(left), "the process that it left to end", server)


def test_all_instances_of_a_model_wait_for_its_completed_configuration(server):
    before = server.stubs()
    # The first instance completes it while others are being forked.
    load(server, "many")
    assert len(set(server.stubs()) - set(before)) == 5
    assert "of model 'many' is not healthy" not in server.log()


def test_a_fork_server_that_is_killed_or_out_of_date_is_replaced(server, repository):
    load(server, "lost0", "lost1", "lost2")
    (killed,) = fork_servers(server, "/lost")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not alive(killed), "the fork server to end")
    load(server, "lost3")
    (outdated,) = fork_servers(server, "/lost")
    # A stub has what was installed after its fork server had started.
    site = repository.parent / "lost" / "packages" / "sitecustomize.py"
    site.write_text("import os; os.environ['INSTALLED'] = 'yes'")
    load(server, "lost4")
    code = "import os; self.said = os.environ['INSTALLED']"
    assert server.ask(code, "lost4") == (200, "yes")
    wait_until(lambda: not alive(outdated), "the old fork server to end", server)
    assert len({about(server, f"lost{number}")["pid"] for number in range(5)}) == 5


def test_stubs_start_while_their_fork_server_is_stopped(server):
    load(server, "stopped0", "stopped1", "stopped2")
    (before,) = fork_servers(server, "/stopped")
    os.kill(before, signal.SIGSTOP)
    load(server, "stopped3")
    assert len({about(server, f"stopped{number}")["pid"] for number in range(4)}) == 4
    wait_until(lambda: not alive(before), "the fork server to be killed", server)


@pytest.mark.parametrize("environment", FAILING)
def test_stubs_start_where_a_fork_server_cannot(server, repository, environment):
    site = repository.parent / environment / "packages" / "sitecustomize.py"
    site.write_text(FAILING[environment])
    names = [f"{environment}{number}" for number in range(3)]
    load(server, *names)
    assert len({about(server, name)["hash"] for name in names}) == len(names)
    assert fork_servers(server, f"/{environment}") == []
    told = f"stubs of .*/{environment}/.* start without a fork server: it ended"
    assert len(re.findall(told, server.log())) == 1


def test_none_is_forked_where_that_is_switched_off(repository):
    with running_server(repository, EXPLICIT, "--fork-stubs=false", **PLAINLY) as server:
        load(server, *NAMES[:3])
        assert fork_servers(server) == []
        assert len({about(server, name)["hash"] for name in NAMES[:3]}) == 3


def test_named_memory_is_found():
    before = named_memory(os.getpid())
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        assert named_memory(os.getpid()) - before == {file.name}
        with Path(file.name).open("rb") as again:
            mapped = mmap.mmap(again.fileno(), 4096, access=mmap.ACCESS_READ)
        file.close()
        assert named_memory(os.getpid()) - before == {f"{file.name} (deleted)"}
        mapped.close()
    assert named_memory(os.getpid()) <= before


BUSY = {
    "busy": "while True: pass",
    "sleeping": "threading.Event().wait()",
    "holding_gil": "ctypes.PyDLL(None).pause()",
}


def test_a_killed_server_leaves_no_process_and_no_shared_memory(server, repository):
    """The last test of this server."""
    load(server, *BUSY)
    assert fork_servers(server)
    left = descendants(server.pid)
    # Nothing of theirs has a name there, even while they live: others' things come and go.
    assert not set().union(*map(named_memory, [server.pid, *left]))
    with ThreadPoolExecutor(len(BUSY)) as threads:
        for name, code in BUSY.items():
            mark = f"open({str(repository.parent / name)!r}, 'w').close()"
            threads.submit(server.ask, f"{mark}\n{code}", name)
        wait_until(
            lambda: all((repository.parent / name).exists() for name in BUSY), "them", server
        )
        server.process.kill()
        assert server.process.wait(150) == -signal.SIGKILL
        wait_until(lambda: not any(map(alive, left)), "its processes to end")
