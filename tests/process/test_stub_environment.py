"""Environment variables of the server that a model sees: `--stub-environment`."""

import ast
import re
from pathlib import Path

import pytest

from gpubridge.engine.environments.provider import CLEAN_VARIABLES, stub_variables
from tests.process.environments import borrowing_environment, environment_parameter
from tests.process.server import STARTED, running_server, write_code_model

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "environments.md"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "a",
    "HF_TOKEN": "b",
    "HTTPS_PROXY": "http://user:password@proxy:1",
    "no_proxy": "c",
    "MY_PATH": "d",
    "PATHS": "e",
}
KEPT = {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}


def variables(server, model):
    status, said = server.ask("self.said = dict(os.environ)", model)
    assert status == 200, said
    return ast.literal_eval(said)


@pytest.mark.parametrize("kind", ["inherit", "clean"])
def test_a_model_sees_the_variables_that_it_may(tmp_path, kind):
    write_code_model(tmp_path / "models")
    root = tmp_path / "own"
    (root / "bin").mkdir(parents=True)
    for name, text in borrowing_environment().items():
        (root / name).write_bytes(text)
        (root / name).chmod(0o755)
    write_code_model(tmp_path / "models", "own", config=environment_parameter(root))
    environment = {**SECRETS, **KEPT, "PYTHONHOME": ""}
    blas, options = {}, {}
    if kind == "inherit":
        # Triton's, which is what no flag asks for.
        blas = {"OPENBLAS_NUM_THREADS": "3", "OPENBLAS_THREAD_TIMEOUT": "9"}
        options = {"command": STARTED}
    else:
        options = {"own": True}
    flags = [] if kind == "inherit" else ["--stub-environment=clean"]
    with running_server(
        tmp_path / "models", *flags, environment={**environment, **blas}, **options
    ) as server:
        for model in ("m", "own"):
            seen = variables(server, model)
            assert KEPT.items() <= seen.items()
            # Those that gpubridge sets while it imports NumPy are as they were.
            if blas:
                assert {n: seen[n] for n in seen if n.startswith("OPENBLAS_")} == blas
            assert server.ask("import gc; self.said = gc.isenabled()", model) == (200, "True")
            assert {"PATH", "HOME"} <= seen.keys()
            assert "PYTHONHOME" not in seen
            assert (seen.get("VIRTUAL_ENV") == str(root)) == (model == "own")
            if kind == "inherit":
                assert SECRETS.items() <= seen.items()
            else:
                assert not SECRETS.keys() & seen.keys()


def test_the_list_is_the_documented_one():
    told = DOCS.read_text().partition("## Environment variables")[2].partition("In both cases")[0]
    listed = told.partition("libraries:")[2]
    assert re.findall(r"`(\S+)`", listed) == CLEAN_VARIABLES.split()


def test_names_are_compared_whole():
    given = {**dict.fromkeys(SECRETS, ""), **dict.fromkeys(CLEAN_VARIABLES.split(), "")}
    assert stub_variables(given, clean=True).keys() == set(CLEAN_VARIABLES.split())
    assert stub_variables({**given, "PYTHONHOME": ""}, clean=False) == given
