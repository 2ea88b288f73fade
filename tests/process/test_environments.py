"""Models in environments of their own: other interpreters, and environments that cannot be used."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.process.controlled import control, only
from tests.process.environments import (
    environment_parameter,
    interpreter,
    make_environment,
    other_minors,
    shared_environment,
)
from tests.process.server import running_server, state, wait_until, write_code_model

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
def another(request):
    """The version and the environment of the oldest supported, or newest, other Python of this machine."""
    minors = other_minors() if request.param == "oldest" else reversed(other_minors())
    for minor in minors:
        if folder := shared_environment(minor):
            return (3, minor), folder, 0 if request.param == "oldest" else 280
    return pytest.skip("no other Python from 3.9 on is on PATH")


@pytest.fixture(scope="module")
def server(another, repository, tmp_path_factory):
    """Models in the server's interpreter, in an environment of it, in the other one, and in one that is inside."""
    write_code_model(repository, "own")
    same = make_environment(sys.executable, tmp_path_factory.mktemp("same") / "environment")
    (packages,) = (same / "lib").glob("python3.*/site-packages")
    (packages / "numpy.pth").write_text(str(Path(np.__file__).parents[1]))
    write_code_model(repository, "same", config=environment_parameter(same))
    write_code_model(repository, "another", config=environment_parameter(another[1]))
    inside = write_code_model(
        repository, "inside", config=environment_parameter("$$TRITON_MODEL_DIRECTORY/environment")
    )
    (inside / "environment").symlink_to(another[1])
    (inside / "triton_python_backend_stub").write_bytes(b"\x7fELF")
    packages = str(Path(np.__file__).parents[1])
    environment = {"PYTHONPATH": packages}
    build = f"--backend-config=python,module-build-seconds={another[2]}"
    with running_server(repository, build, environment=environment) as running:
        yield running


def facts(server, model):
    status, text = server.ask(FACTS, model)
    assert status == 200, text
    return json.loads(text)


def test_a_model_runs_on_the_interpreter_of_its_environment(server, another):
    version, folder, _ = another
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


def test_its_stub_runs_the_compiled_module_where_there_is_one_for_its_abi(server, another):
    module = "from gpubridge.tensor.native import absence, native_path; self.said = native_path() or absence()"
    own = server.ask(module, "own")
    assert own[1].startswith("/")
    assert server.ask(module, "same") == own
    assert server.ask("self.said = str(os.environ.get('GPUBRIDGE_STUB_MODULE'))", "same") == (
        200,
        "None",
    )
    found = server.ask(module, "another")[1]
    if another[2] or found.startswith("/"):
        assert Path(found).name.startswith("_native.")
        assert found != own[1]
    else:
        assert "compiled modules are for CPython 3.10" in found or "and none is built, as" in found
        assert f"it runs slower: {found}" in server.log()


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


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def unusable(folder):
    """Make environments that cannot be used; returns the path of each by name, and why not."""
    no_numpy = make_environment(sys.executable, folder / "no_numpy")
    # The server sees nothing of this stub before it has ended, its first message unread.
    stopping = f'case "$*" in *bootstrap*) kill -STOP $PPID;; esac; exec {no_numpy}/bin/python "$@"'
    for name, text in (
        ("no_program", "#!/nowhere/python3\n"),
        ("no_python", "#!/bin/sh\necho me\n"),
        ("broken", "#!/bin/sh\necho libpython is missing >&2; exit 127\n"),
        ("stopping", f"#!/bin/sh\n{stopping}\n"),
        ("nested/inner", ""),
    ):
        write_script(folder / name / "bin" / "python3", text)
    (folder / "moved" / "bin").mkdir(parents=True)
    (folder / "moved" / "bin" / "python3").symlink_to("/no/such/python3")
    (folder / "empty").mkdir()
    reasons = {
        "missing": "missing does not exist. The Python environment should",
        "empty": "holds no bin/python3: expected a virtual environment",
        "moved": "its bin/python3 is a link to /no/such/python3, which this",
        "nested": "got one in its folder 'inner': that has to be the top",
        "no_python": "it is no Python: asked for its version it says 'me'",
        "broken": "it ended with code 127: libpython is missing",
        "no_numpy": "cannot import numpy: No module named 'numpy'; install numpy",
        "no_program": "it cannot be started: No such file or directory",
        "stopping": "cannot import numpy",
    }
    too_old = next(filter(None, map(interpreter, (8, 7, 6))), None)
    if too_old is not None:
        make_environment(too_old, folder / "too_old")
        reasons["too_old"] = "a stub needs Python 3.9 or newer: make the environment with a newer"
    cases = {name: (folder / name, reason) for name, reason in reasons.items()}
    relative = "Failed to get the canonical path for environments/mine."
    return {**cases, "relative": ("environments/mine", relative)}


def test_an_environment_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    models = tmp_path / "models"
    cases = unusable(tmp_path)
    for name, (path, _) in cases.items():
        write_code_model(models, name, config=environment_parameter(path))
    write_code_model(models, "good")
    with (
        running_server(models, *only("good")) as server,
        ThreadPoolExecutor(len(cases)) as threads,
    ):
        last = threads.submit(control, server, "load", "stopping")
        wait_until(lambda: state(server.pid) == "T", "the stub to start", server)
        wait_until(lambda: len(server.stubs()) == 1, "the stub to end")
        os.kill(server.pid, signal.SIGCONT)
        assert last.result()[0] == 400
        names = sorted(cases.keys() - {"stopping"})
        answers = list(threads.map(lambda name: control(server, "load", name), names))
        assert [status for status, _ in answers] == [400] * len(names)
        reasons = {name: row.get("reason", "") for (name, _), row in server.index().items()}
        assert server.ask("self.said = 1", "good") == (200, "1")
    assert {
        name: reasons[name] for name, (_, text) in cases.items() if text not in reasons[name]
    } == {}
