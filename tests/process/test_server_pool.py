"""Servers that tests share: a test finds its own models only, and never a server that another one has changed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import run_folder, server_starts
from tests.process import server_pool
from tests.process.server import alive, running_server, write_code_model

FLAGS = ("--exit-timeout-secs=77",)
"""Those of no other test."""
WORKER = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from tests import run_folder
run_folder.pytest_configure(SimpleNamespace(workerinput={"gpubridge_run": sys.argv[1]}))
from tests.process.server import running_server
with running_server(Path(sys.argv[2]), *sys.argv[3:]) as server:
    print(server.pid, flush=True)
    os._exit(0)
"""


def pid_of_next(folder, change=lambda server: None, flags=FLAGS):
    """Use a server; return its process id and the models that it had."""
    write_code_model(folder, f"of_{folder.name}")
    with running_server(folder, *flags) as server:
        assert server.ask("self.said = 1", f"of_{folder.name}") == (200, "1")
        ready = {name for (name, _), row in server.index().items() if row.get("state") == "READY"}
        change(server)
        return server.pid, ready


def test_workers_share_servers_and_what_one_had_that_died_is_ended(tmp_path):
    pid, _ = pid_of_next(tmp_path / "one")
    write_code_model(tmp_path / "two", "m")
    words = [sys.executable, "-c", WORKER, run_folder.path(), tmp_path / "two", *FLAGS]
    worker = subprocess.run(
        words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=True
    )
    assert int(worker.stdout) == pid
    assert pid_of_next(tmp_path / "three")[0] != pid
    assert not alive(pid)


def test_the_next_test_has_the_same_server_with_its_own_models_and_log(tmp_path):
    logs = []
    one = pid_of_next(tmp_path / "one")
    two = pid_of_next(tmp_path / "two", lambda server: logs.append(server.log()))
    assert one[0] == two[0]
    assert (one[1], two[1]) == ({"of_one"}, {"of_two"})
    assert "of_two" in logs[0]
    assert "of_one" not in logs[0]


def post(path, **body):
    return lambda server: server.request("POST", path, json.dumps(body))


def fail(server):
    raise LookupError(server.pid)


def test_a_server_that_was_stopped_or_changed_or_whose_test_failed_is_not_lent_again(tmp_path):
    seen = [pid_of_next(tmp_path / "first", post("/v2/trace/setting", trace_rate="7"))[0]]
    seen.append(pid_of_next(tmp_path / "second", lambda server: server.stop())[0])
    with pytest.raises(LookupError) as failed:
        pid_of_next(tmp_path / "third", fail)
    seen += failed.value.args
    assert len({*seen}) == len(seen)
    assert not any(map(alive, seen))


def test_a_server_in_another_mode_is_not_lent(tmp_path):
    flags = *FLAGS, "--model-control-mode=none"
    assert server_pool.lend(lambda *words: pytest.fail("a start"), tmp_path, flags) is None


def test_a_run_with_too_many_starts_fails(monkeypatch):
    config = SimpleNamespace(option=SimpleNamespace(markexpr="not nightly"))
    session = SimpleNamespace(config=config, exitstatus=pytest.ExitCode.OK)
    monkeypatch.setattr(server_starts, "_starts", server_starts.Counter(a=server_starts.MOST))
    server_starts.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert session.exitstatus == pytest.ExitCode.OK
    server_starts.count()
    server_starts.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    session.exitstatus, config.option.markexpr = pytest.ExitCode.OK, ""
    server_starts.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert session.exitstatus == pytest.ExitCode.OK, "nightly tests may start more"
