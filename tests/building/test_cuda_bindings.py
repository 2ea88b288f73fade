"""The driver's functions and constants that gpubridge uses exist in each release of cuda-bindings that it takes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In the form that only one of the releases has, gpubridge asks first.
EITHER = {"cuDeviceGetUuid", "cuDeviceGetUuid_v2"}
RELEASES = ("12.9.1", "12.9.*", "13.0.*", "13.*")
LOOK = """
import json, sys
from cuda.bindings import driver
lacking = []
for name in json.load(sys.stdin):
    found = driver
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        lacking.append(name)
json.dump([sys.modules["cuda.bindings"].__version__, lacking], sys.stdout)
"""

pytestmark = [pytest.mark.building, pytest.mark.timeout(600)]


def used_names():
    """The names that are passed to `call` and its like, and those that are read of the module."""
    names = set()
    for path in (ROOT / "gpubridge").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(
                r"(cu[A-Z]|CU[a-z])\w+", str(node.value)
            ):
                names.add(node.value)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("load()."):
                names.add(ast.unparse(node).removeprefix("load().").partition("(")[0])
    return names


@pytest.fixture(scope="module", params=RELEASES)
def bindings(request, tmp_path_factory):
    """A folder with a release of the bindings, and nothing else."""
    folder = tmp_path_factory.mktemp("bindings")
    wanted = [f"cuda-bindings=={request.param}", "cuda-pathfinder"]
    options = ["--no-deps", "--only-binary=:all:", "-q", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no index has {wanted[0]}: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_all_names_exist(bindings):
    names = used_names()
    assert {"cuMemHostRegister", "CUipcMemHandle"} < names
    assert "CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE" in names
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        input=json.dumps(sorted(names)),
        env={**os.environ, "PYTHONPATH": str(bindings)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, lacking = json.loads(done.stdout)
    assert (bindings / f"cuda_bindings-{version}.dist-info").exists()
    assert set(lacking) < EITHER, f"cuda-bindings {version}"


def test_calls_are_as_the_stubs_say(bindings):
    if not list((bindings / "cuda" / "bindings").glob("driver.pyi")):
        pytest.skip("this release of cuda-bindings has no type stubs")
    subprocess.run(
        [sys.executable, "-m", "mypy", "gpubridge/cuda_ipc"],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(bindings)},
        check=True,
    )
