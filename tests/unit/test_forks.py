"""Processes that are forked: each with its own environment and end, and none that stays."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forks import adopt, fork
from tests.process.server import alive, children, wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 60
# Answers each line with what it makes of it.
EVALUATE = """
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


def asked(process, expression):
    process.stdin.write(f"{expression}\n")
    process.stdin.flush()
    return json.loads(line(process.stdout))


def line(stream):
    """Return the next line; a process writes one when it is asked, and not before."""
    assert select.select([stream], [], [], SECONDS)[0], f"no answer in {SECONDS} s"
    return stream.readline()


@pytest.fixture
def forked():
    with ExitStack() as opened:

        def make(*arguments, imports="import socket", folder=None, stays=False, **environment):
            source, stdin = os.pipe()
            stdout, target = os.pipe()
            variables, streams = {**os.environ, **environment}, (source, target, 2)
            process = fork(imports, EVALUATE, variables, streams, arguments, folder, stays=stays)
            os.close(source)
            os.close(target)
            process.stdin = opened.enter_context(os.fdopen(stdin, "w"))
            process.stdout = opened.enter_context(os.fdopen(stdout))
            opened.callback(process.close)
            return process

        yield make


def test_each_is_another_process_with_its_own_environment(forked):
    first, second = forked(FORK_TEST="one"), forked(FORK_TEST="two", FORK_OTHER="")
    assert len({first.pid, second.pid, os.getpid()}) == 3
    assert asked(first, "[os.getpid(), os.getppid()]")[0] == first.pid
    for process, seen in ((first, ["one", None]), (second, ["two", ""])):
        assert asked(process, "[os.getenv('FORK_TEST'), os.getenv('FORK_OTHER')]") == seen
    assert asked(first, "os.getppid()") == asked(second, "os.getppid()")


def test_what_is_read_at_the_start_of_a_process_is_its_own_too(forked):
    usual, other = forked(), forked(PYTHONHASHSEED="7")
    assert asked(other, "hash('a')") == asked(forked(PYTHONHASHSEED="7"), "hash('a')")
    assert asked(usual, "os.getppid()") != asked(other, "os.getppid()")


def test_what_imports_read_is_what_a_fork_is_given(forked):
    imports = "import os, socket; os.getenv('FORK_READ'); 'FORK_ABSENT' in os.environ"
    first = forked(imports=imports, FORK_READ="one", FORK_OTHER="one")
    same = forked(imports=imports, FORK_READ="one", FORK_OTHER="two")
    assert asked(same, "os.getppid()") == asked(first, "os.getppid()")
    for changed in ({"FORK_READ": "two"}, {"FORK_READ": "one", "FORK_ABSENT": ""}):
        other = forked(imports=imports, **changed)
        assert asked(other, "os.getppid()") != asked(first, "os.getppid()")
        again = forked(imports=imports, FORK_OTHER="two", **changed)
        assert asked(again, "os.getppid()") == asked(other, "os.getppid()")


def test_its_arguments_folder_and_poll(forked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = forked("--one", "2")
    assert asked(process, "[sys.argv[1:], os.getcwd()]") == [["--one", "2"], str(tmp_path)]
    assert asked(forked(folder=tmp_path.parent), "os.getcwd()") == str(tmp_path.parent)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == process.poll() == process.returncode == -signal.SIGTERM
    process.terminate()


def test_its_streams_are_those_of_an_interpreter(forked):
    code = "[(s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)]"
    started = subprocess.run(
        [sys.executable, "-c", f"import json, sys; print(json.dumps({code}))"],
        input="", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked(forked(), code) == json.loads(started.stdout)


def test_none_has_the_driver_or_a_thread_from_its_parent(forked):
    process = forked()
    assert "libcuda.so" not in asked(process, "open('/proc/self/maps').read()")
    assert asked(process, "len(os.listdir('/proc/self/task'))") == 1


def test_none_holds_the_pipes_of_another(forked):
    first = forked()
    others = [forked() for _ in range(3)]
    assert len({asked(each, "len(os.listdir('/proc/self/fd'))") for each in (first, *others)}) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(3)", 3), ("os._exit(4)", 4), ("os.kill(os.getpid(), 11)", -11), ("None/0", 1)],
)
def test_its_end_is_told(forked, code, status):
    process = forked()
    process.stdin.write(f"{code}\n")
    process.stdin.flush()
    assert line(process.stdout) == ""
    assert process.wait(SECONDS) == status
    assert not alive(process.pid)
    process.kill()
    assert process.wait(SECONDS) == status


def test_who_is_killed_is_gone(forked):
    process, other = forked(), forked()
    process.kill()
    assert process.wait(SECONDS) == -9
    assert not Path(f"/proc/{process.pid}").exists()
    assert asked(other, "1") == 1


def test_others_of_the_run_can_adopt_one_that_stays_and_are_told_its_end(forked):
    process = forked(stays=True)
    other = adopt(process.parent, process.pid)
    assert asked(process, "1") == 1
    assert other.poll() is None
    other.terminate()
    late = adopt(process.parent, process.pid)
    for each in (other, process, late):
        assert each.wait(SECONDS) == -signal.SIGTERM
        each.let_go()


@pytest.mark.parametrize("kill", [True, False])
def test_all_end_with_the_process_that_asked_for_them(kill):
    code = (
        "import os, sys, tests.forks as forks\n"
        "program = 'for line in sys.stdin: pass'\n"
        "process = forks.fork('import socket', program, dict(os.environ), (os.pipe()[0], 2, 2))\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with asking:
        try:
            forked = int(line(asking.stdout))
            (first,) = children(asking.pid)
            (parent,) = children(first)
            assert children(parent) == [forked]
            if kill:
                asking.kill()
            asking.stdin.close()
            asking.wait(SECONDS)
        finally:
            asking.kill()
    for pid in (first, parent, forked):
        wait_until(lambda pid=pid: not alive(pid), "its end")
