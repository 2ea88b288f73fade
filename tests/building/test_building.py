"""The package is built as a user builds it: with CMake, and by ./dev and pip without a compiler.

These take minutes: ./dev test -m building -n 0, and ./dev test --all.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tritonclient.http

from tests.building.commands import run

# Programs that a machine without a tool chain lacks, by whatever prefix and release.
TOOL_CHAIN = re.compile(
    r"(.*-)?(ar|as|c\+\+|cc|c89|c99|clang|clang\+\+|cmake|cpp|g\+\+|gcc|gmake|ld|lld|make|ninja|ranlib|zig)(-[\d.]+)?"
)

pytestmark = [pytest.mark.building, pytest.mark.timeout(1800)]


@pytest.fixture
def bare(tmp_path):
    """The environment of a user whose PATH has every program but a tool chain, and a python3."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    for place in filter(os.path.isdir, ("/usr/local/bin", "/usr/bin", "/bin")):
        for program in Path(place).iterdir():
            found = folder / program.name
            if not TOOL_CHAIN.fullmatch(program.name) and not found.is_symlink():
                found.symlink_to(program)
    dropped = ("CC", "CXX", "PYTHON", "PYTHONPATH", "GPUBRIDGE_VENV", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and "CMAKE" not in k}
    return kept | {"PATH": str(folder)}


def test_there_is_no_tool_chain_on_the_bare_path(bare):
    for name in ("c++", "g++", "gcc", "cc", "clang++", "cmake", "ninja", "make", "ld", "zig"):
        assert shutil.which(name, path=bare["PATH"]) is None
    assert shutil.which("python3", path=bare["PATH"])


def assert_stays_until_interrupted(checkout, variables):
    """`./dev demo --stay` serves until Ctrl-C, which a terminal sends to all of its processes."""
    with subprocess.Popen(
        ["./dev", "demo", "--stay"],
        cwd=checkout,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        said = []
        for line in demo.stderr:
            said.append(line)
            if "Ctrl-C ends it" in line:
                (url,) = re.findall(r"keeps running at http://(\S+) ", "".join(said))
                with tritonclient.http.InferenceServerClient(url) as client:
                    assert client.is_model_ready("read_text")
                os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 0, "".join(said)
        assert "the server stopped cleanly" in said[-1]


def test_the_two_commands_of_the_readme_without_a_compiler(checkout, bare):
    run("./dev", "demo", cwd=checkout, variables=bare)
    assert (checkout / "demo-output" / "contact_sheet.png").exists()
    assert (checkout / "demo-output" / "bill.png").exists()
    assert_stays_until_interrupted(checkout, bare)
    assert list(checkout.glob(".venv/lib/*/site-packages/gpubridge/_native*.so"))
    started = run(".venv/bin/tritonserver", "--help", cwd=checkout, variables=bare)
    assert "usage: tritonserver [FLAG ...]" in started
    (cache,) = checkout.glob("build/*/CMakeCache.txt")
    assert "cmake/zig.cmake" in cache.read_text()
    tests = [f"tests/unit/{name}" for name in ("test_tensor_native.py", "test_doctor.py")]
    codecs = sorted(checkout.glob("tests/unit/test_tensor_*.py"))
    printed = run("./dev", "test", "-n", "0", *tests, *codecs, cwd=checkout, variables=bare)
    assert " passed" in printed

    # A wheel, as others would install it: complete, and tagged for what it runs on.
    run(
        ".venv/bin/python",
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "-w",
        "wheels",
        ".",
        cwd=checkout,
        variables=bare,
    )
    (wheel,) = (checkout / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(re.fullmatch(r"gpubridge/_native[^/]*\.so", name) for name in names)
    assert "gpubridge/server.py" in names
    assert "-none-any" not in wheel.name


def test_a_plain_build_by_cmake(checkout, tmp_path):
    """Configure, build and install; then a checkout runs as it is."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path, variables=None)
    run(venv / "bin/pip", "install", "-q", "nanobind", "cmake>=3.26", cwd=tmp_path, variables=None)
    variables = os.environ | {"PATH": f"{venv}/bin:{os.environ['PATH']}"}
    run(
        "cmake",
        "-S",
        ".",
        "-B",
        "build",
        "-DGPUBRIDGE_WERROR=ON",
        f"-DGPUBRIDGE_STUB_PYTHONS={sys.executable}",
        cwd=checkout,
        variables=variables,
    )
    run("cmake", "--build", "build", "--parallel", "2", cwd=checkout, variables=variables)
    run(
        "cmake",
        "--install",
        "build",
        "--prefix",
        tmp_path / "prefix",
        cwd=checkout,
        variables=variables,
    )
    installed = tmp_path / "prefix" / "gpubridge"
    (module,) = installed.glob("_native*.so")
    # The wheel's module for models' interpreters, which it was built and loaded with; and its source.
    (carried,) = (installed / "stub_modules").iterdir()
    assert carried.stat().st_size < module.stat().st_size
    assert (installed / "stub_source" / "nanobind" / "LICENSE").exists()
    code = "import _native; print(_native.__file__)"
    seen = run(venv / "bin/python", "-c", code, cwd=module.parent, variables=variables)
    assert seen.strip() == str(module)

    run("cmake", "--install", "build", cwd=checkout, variables=variables)
    assert (checkout / "gpubridge" / module.name).exists()
