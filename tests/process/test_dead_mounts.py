"""Files that never answer, as on a dead mount: they hold up what is loaded from them, nothing else."""

import json
from concurrent.futures import ThreadPoolExecutor

from tests.process.completing import FULL, write_completing
from tests.process.controlled import control
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


def test_a_model_whose_files_hang_holds_up_no_other_no_poll_and_no_stop(tmp_path):
    models = tmp_path / "models"
    for name in ("good", "dead"):
        write_code_model(models, name)
    for name in ("dead_link", "gone"):
        (models / name).symlink_to("good")
    (models / "README.md").symlink_to("good/config.pbtxt")
    for name in ("directory", "archive.tar.gz"):
        parameter = environment_parameter(tmp_path / "dead" / name)
        write_code_model(models, f"in_{name[:7]}", config=parameter)
    repositories = [tmp_path / "dead", models]
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(repositories, *flags) as server:
        up = ("good", "gone")
        wait_until(lambda: all(map(server.is_ready, up)), "the others", server)
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert server.request("GET", "/v2/health/live")[0] == 200
        assert not server.is_ready()
        states = {name: row["state"] for (name, _), row in server.index().items()}
        hanging = ("dead", "dead_link", "in_archive", "in_directo")
        assert states == dict.fromkeys(hanging, "LOADING") | dict.fromkeys(up, "READY")
        told = f"looking for {models / 'dead'} takes longer than 5 s"
        wait_until(lambda: told in server.log(), "a line about it", server)
        line = next(line for line in server.log().splitlines() if told in line)
        assert ", in call, line " in line  # the function that hangs
        # Those that answer are polled, one without a config.pbtxt, too.
        write_completing(models, "late")
        (models / "gone").unlink()
        wait_until(lambda: server.is_ready("late"), "the new model", server)
        wait_until(lambda: not server.is_ready("gone"), "the one that is gone to go", server)
        assert server.ask("self.said = 2", "late") == (200, "2")
        # A change of what such a model says of itself is seen.
        (models / "late" / "1" / "model.py").unlink()
        write_completing(models, "late", "c.set_max_batch_size(5)\n" + FULL)
        wait_until(lambda: largest_batch(server, "late") == 5, "its change", server)
        assert "'good' is new" not in server.log()
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def largest_batch(server, name):
    return json.loads(server.request("GET", f"/v2/models/{name}/config")[2])["max_batch_size"]


def test_a_repository_that_hangs_holds_up_no_other(tmp_path):
    write_code_model(tmp_path / "models", "good")
    write_code_model(tmp_path / "models", "other")
    write_code_model(tmp_path / "dead", "there")
    repositories = [tmp_path / "models", tmp_path / "dead"]
    with (
        ThreadPoolExecutor(2) as threads,
        serving(repositories, "--model-control-mode=explicit", "--load-model=good") as server,
    ):
        wait_until(server.is_ready, "the server", server)
        assert server.ask("self.said = 1", "good") == (200, "1")
        assert control(server, "load", "other") == (200, "")
        loads = [threads.submit(control, server, "load", "there") for _ in range(2)]
        wait_until(lambda: ("there", 0) in server.index(), "the load to begin", server)
        states = {name: row["state"] for (name, _), row in server.index().items()}
        assert states == {"good": "READY", "other": "READY", "there": "LOADING"}
        assert server.ask("self.said = 2", "other") == (200, "2")
        assert server.is_ready()
        assert server.stop() == 0
        assert [load.result() for load in loads] == [(503, "the server is stopping")] * 2
        assert "Traceback" not in server.log()
