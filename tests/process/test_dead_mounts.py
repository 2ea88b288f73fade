"""Files that never answer, as on a dead mount: they hold up what is loaded from them, nothing else."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process.environments import environment_parameter
from tests.process.server import running_server, wait_until, write_code_model

# What asks the file system about a path with "dead" in it does not return.
HANG = """
import builtins, os, sys

silent, _ = os.pipe()

def hanging(function):
    def call(path=".", *rest, **named):
        while "dead" in os.fspath(path if not isinstance(path, int) else ""):
            os.read(silent, 1)
        return function(path, *rest, **named)
    return call

for name in ("stat", "lstat", "scandir", "listdir", "open", "readlink"):
    setattr(os, name, hanging(getattr(os, name)))
builtins.open = hanging(builtins.open)
from gpubridge.cli import main
sys.exit(main())
"""


def serving(repositories, *flags):
    flags = (*flags, "--exit-timeout-secs=2")
    return running_server(repositories, *flags, ready=False, command=("-c", HANG))


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def loads(server, name):
    return server.request("POST", f"/v2/repository/models/{name}/load", "{}")


def test_a_model_whose_files_hang_holds_up_no_other_no_poll_and_no_stop(tmp_path):
    for name in ("good", "gone", "dead"):
        write_code_model(tmp_path, name)
    (tmp_path / "dead_link").symlink_to("good")
    (tmp_path / "link").symlink_to("good")
    (tmp_path / "README.md").symlink_to("good/config.pbtxt")
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(tmp_path, *flags) as server:
        up = ("good", "gone", "link")
        wait_until(lambda: all(map(server.is_ready, up)), "the others", server)
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert server.request("GET", "/v2/health/live")[0] == 200
        assert not server.is_ready()
        states = {name: row["state"] for (name, _), row in server.index().items()}
        loading = dict.fromkeys(("dead", "dead_link"), "LOADING")
        assert states == loading | dict.fromkeys(up, "READY")
        told = f"looking for {tmp_path / 'dead'} takes longer than 5 s"
        wait_until(lambda: told in server.log(), "a line about it", server)
        line = next(line for line in server.log().splitlines() if told in line)
        assert ", in call, line " in line  # the function that hangs
        # Those that answer are polled.
        write_code_model(tmp_path, "late")
        shutil.rmtree(tmp_path / "gone")
        wait_until(lambda: server.is_ready("late"), "the new model", server)
        wait_until(lambda: not server.is_ready("gone"), "the one that is gone to go", server)
        assert server.ask("self.said = 2", "late") == (200, "2")
        assert "'good' is new" not in server.log()
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def test_a_repository_that_hangs_holds_up_no_other(tmp_path, threads):
    write_code_model(tmp_path / "models", "good")
    write_code_model(tmp_path / "models", "other")
    write_code_model(tmp_path / "dead", "there")
    repositories = [tmp_path / "models", tmp_path / "dead"]
    with serving(repositories, "--model-control-mode=explicit", "--load-model=good") as server:
        wait_until(server.is_ready, "the server", server)
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert loads(server, "other")[0] == 200
        hanging = threads.submit(loads, server, "there")
        again = threads.submit(loads, server, "there")
        wait_until(lambda: ("there", 0) in server.index(), "the load to begin", server)
        index = server.index()
        assert {name: row["state"] for (name, _), row in index.items()} == {
            "good": "READY",
            "other": "READY",
            "there": "LOADING",
        }
        assert server.ask("self.said = 2", "other") == (200, "2")
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert server.stop() == 0
        for load in (hanging, again):
            status, _, body = load.result()
            assert (status, json.loads(body)["error"]) == (503, "the server is stopping")
        assert "Traceback" not in server.log()


def test_all_models_of_the_repositories_that_answer_are_loaded(tmp_path):
    write_code_model(tmp_path / "models", "good")
    (tmp_path / "dead").mkdir()
    with serving([tmp_path / "dead", tmp_path / "models"]) as server:
        wait_until(lambda: server.is_ready("good"), "the model", server)
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert server.stop() == 0


@pytest.mark.parametrize("environment", ["directory", "archive.tar.gz"])
def test_an_environment_that_hangs_holds_up_no_other_model(tmp_path, environment):
    write_code_model(tmp_path, "good")
    parameter = environment_parameter(tmp_path / "dead" / environment)
    write_code_model(tmp_path, "hanging", config=parameter)
    with serving(tmp_path) as server:
        wait_until(lambda: server.is_ready("good"), "the other", server)
        assert server.index()["hanging", 1]["state"] == "LOADING"
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert server.stop() == 0
        assert "Traceback" not in server.log()
