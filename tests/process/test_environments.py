"""Models in environments of their own: other interpreters, and environments that cannot be used."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.process.environments import (
    environment_parameter,
    interpreter,
    make_environment,
    other_minors,
    shared_environment,
)
from tests.process.server import STARTED, running_server, state, wait_until, write_code_model

FACTS = """
import json
self.said = json.dumps({
    "version": list(sys.version_info[:2]),
    "executable": sys.executable,
    "prefix": sys.prefix,
    "numpy": np.__file__,
    "path": sys.path,
    "environment": {key: os.environ.get(key) for key in ("VIRTUAL_ENV", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH")},
    "bridge": sys.modules["gpubridge"].__file__,
    "began_with": open("/proc/self/environ").read().split("\\0"),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
})
"""
OWN = (sys.version_info.major, sys.version_info.minor)


@pytest.fixture(
    scope="module", params=["oldest", pytest.param("newest", marks=pytest.mark.nightly)]
)
def another(request, tmp_path_factory):
    """The version and the environment of the oldest supported, or newest, other Python of this machine."""
    minors = other_minors() if request.param == "oldest" else reversed(other_minors())
    for minor in minors:
        if folder := shared_environment(tmp_path_factory, minor):
            return (3, minor), folder
    return pytest.skip("no other Python from 3.9 on is on PATH")


@pytest.fixture(scope="module")
def server(another, tmp_path_factory):
    """A model in the server's interpreter, one in the environment, one whose environment is inside."""
    repository = tmp_path_factory.mktemp("models")
    write_code_model(repository, "own")
    write_code_model(repository, "another", config=environment_parameter(another[1]))
    inside = write_code_model(
        repository, "inside", config=environment_parameter("$$TRITON_MODEL_DIRECTORY/environment")
    )
    (inside / "environment").symlink_to(another[1])
    (inside / "triton_python_backend_stub").write_bytes(b"\x7fELF")
    packages = str(Path(np.__file__).parents[1])
    environment = {"PYTHONPATH": packages}
    with running_server(repository, environment=environment, command=STARTED) as running:
        yield running


def facts(server, model):
    status, text = server.ask(FACTS, model)
    assert status == 200, text
    return json.loads(text)


def test_a_model_runs_on_the_interpreter_of_its_environment(server, another):
    version, folder = another
    seen = facts(server, "another")
    assert tuple(seen["version"]) == version
    assert seen["prefix"] == str(folder)
    assert seen["numpy"].startswith(str(folder))
    assert seen["environment"]["VIRTUAL_ENV"] == str(folder)
    assert seen["environment"]["PATH"].split(":")[0] == str(folder / "bin")
    # Its libraries are for the interpreter, not for what the model starts.
    before = os.environ.get("LD_LIBRARY_PATH")
    assert seen["environment"]["LD_LIBRARY_PATH"] == before
    began = ":".join([str(folder / "lib"), *([before] if before else [])])
    assert f"LD_LIBRARY_PATH={began}" in seen["began_with"]


def test_an_environment_sees_the_package_and_nothing_else_of_the_server_s(server):
    import gpubridge  # only to know where it lies

    package = Path(gpubridge.__file__)
    seen = facts(server, "another")
    assert seen["bridge"] == str(package)
    assert str(package.parents[1]) not in seen["path"]
    assert not [entry for entry in seen["path"] if entry.startswith(sys.prefix + os.sep)]
    assert seen["environment"]["PYTHONPATH"] is None
    assert not {"uvloop", "orjson", "google", "torch"} & set(seen["modules"])


def test_without_an_environment_it_is_the_interpreter_of_the_server(server):
    seen = facts(server, "own")
    assert tuple(seen["version"]) == OWN
    assert os.path.realpath(seen["executable"]) == os.path.realpath(sys.executable)
    assert seen["numpy"] == np.__file__


def test_an_environment_may_lie_in_the_directory_of_its_model(server, another):
    assert tuple(facts(server, "inside")["version"]) == another[0]


def test_a_stub_that_was_built_for_triton_is_ignored_and_said_so(server):
    assert (
        "inside/triton_python_backend_stub is ignored: stubs here run on any Python" in server.log()
    )


def test_errors_deaths_and_restarts_are_those_of_any_model(server):
    assert server.ask("sys.exit(5)", "another")[0] == 500
    status, error = server.ask("os._exit(3)", "another")
    expected = "Stub process 'another_0' is not healthy. It exited with code 3."
    assert (status, error) == (503, expected)
    assert server.ask("print('printed'); self.said = 'ä€😀'", "another") == (200, "ä€😀")
    wait_until(lambda: "printed\n" in server.log(), "the line", server)


def test_a_stubs_last_message_is_read_after_its_exit(tmp_path):
    no_numpy = make_environment(sys.executable, tmp_path / "no_numpy")
    program = tmp_path / "environment" / "bin" / "python3"
    program.parent.mkdir(parents=True)
    # The server sees nothing of this stub before it has ended, its first message unread.
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *bootstrap*) kill -STOP $PPID;; esac\nexec {no_numpy}/bin/python "$@"\n'
    )
    program.chmod(0o755)
    write_code_model(tmp_path / "models", config=environment_parameter(tmp_path / "environment"))
    with running_server(tmp_path / "models", "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: state(server.pid) == "T", "the stub to start", server)
        wait_until(lambda: not server.stubs(), "the stub to end")
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: server.index()["m", 1]["state"] == "UNAVAILABLE", "the end", server)
        assert "cannot import numpy" in server.index()["m", 1]["reason"]


def test_an_environment_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    models = tmp_path / "models"
    no_numpy = make_environment(sys.executable, tmp_path / "no_numpy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_program" / "bin").mkdir(parents=True)
    (tmp_path / "no_program" / "bin" / "python3").write_text("#!/nowhere/python3\n")
    (tmp_path / "no_program" / "bin" / "python3").chmod(0o755)
    for folder in ("moved", "no_python", "broken", "nested/inner"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    (tmp_path / "moved" / "bin" / "python3").symlink_to("/no/such/python3")
    (tmp_path / "nested" / "inner" / "bin" / "python3").write_text("")
    for folder, text in (
        ("no_python", "echo me"),
        ("broken", "echo libpython is missing >&2; exit 127"),
    ):
        program = tmp_path / folder / "bin" / "python3"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    cases = {
        "missing": (tmp_path / "nothing", "nothing does not exist. The Python environment should"),
        "empty": (tmp_path / "empty", "holds no bin/python3: expected a virtual environment"),
        "relative": (
            "environments/mine",
            "Failed to get the canonical path for environments/mine.",
        ),
        "moved": (tmp_path / "moved", "its bin/python3 is a link to /no/such/python3, which this"),
        "nested": (tmp_path / "nested", "got one in its folder 'inner': that has to be the top"),
        "no_python": (
            tmp_path / "no_python",
            "it is no Python: asked for its version it says 'me'",
        ),
        "broken": (tmp_path / "broken", "it ended with code 127: libpython is missing"),
        "no_numpy": (no_numpy, "cannot import numpy: No module named 'numpy'; install numpy"),
        "no_program": (tmp_path / "no_program", "it cannot be started: No such file or directory"),
    }
    too_old = next(filter(None, map(interpreter, (8, 7, 6))), None)
    if too_old is not None:
        folder = make_environment(too_old, tmp_path / "too_old")
        cases["too_old"] = (
            folder,
            "a stub needs Python 3.9 or newer: make the environment with a newer",
        )
    for name, (path, _) in cases.items():
        write_code_model(models, name, config=environment_parameter(path))
    write_code_model(models, "good")
    with running_server(models, "--exit-on-error=false", ready=False) as server:
        wait_until(lambda: server.is_ready("good"), "the good model", server)
        wait_until(
            lambda: (
                not any(row["state"] == "LOADING" for row in server.index().values())
                and len(server.index()) == len(cases) + 1
            ),
            "the others",
            server,
        )
        reasons = {name: row.get("reason", "") for (name, _), row in server.index().items()}
    assert {
        name: reasons[name] for name, (_, text) in cases.items() if text not in reasons[name]
    } == {}
