"""Cost of importing the package, and syntax that a stub's oldest interpreter can parse."""

import ast
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
STUB_SIDE = ("backends", "host_shm", "pb_utils", "stub", "tensor", "transport")
FOREIGN = ("torch", "cupy", "jax", "grpc", "cuda.bindings", "tritonclient", "google.protobuf")
SERVER_ONLY = ("uvloop", "orjson")
# Stubs without coroutines and without a GPU do without: 5 MiB of each.
UNUSUAL = ("asyncio", "ssl", "logging", "subprocess", "pathlib", "gpubridge.cuda_ipc")
# These are not imported for the version, or for help.
LATE = (*FOREIGN, *SERVER_ONLY, "numpy", "asyncio", "difflib", "gpubridge.config")


def loaded_by(statement):
    """Run a statement in an interpreter of its own; return its modules and mapped libraries."""
    # Some packages, cuda-bindings for one, load a little of themselves into every interpreter.
    code = (
        f"import sys\nbefore = set(sys.modules)\n{statement}\n"
        "print(*set(sys.modules) - before)\nprint(open('/proc/self/maps').read())"
    )
    finished = run_command([sys.executable, "-c", code], cwd=ROOT, check=True)
    modules, _, maps = finished.stdout.partition("\n")
    return set(modules.split()), maps


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import gpubridge", (*FOREIGN, *SERVER_ONLY, "numpy", "asyncio")),
        ("import gpubridge.pb_utils", (*FOREIGN, *SERVER_ONLY, "asyncio")),
        ("import triton_python_backend_utils", (*FOREIGN, *SERVER_ONLY)),
        ("import gpubridge.stub.process", (*FOREIGN, *SERVER_ONLY, *UNUSUAL)),
        ("from gpubridge import cli; cli.whole_parser(())", LATE),
        ("from gpubridge import cli; cli.command_parser('init')", LATE),
        ("from gpubridge import cli; cli.command_parser('serve')", (*FOREIGN[:-2], "uvloop")),
        ("from gpubridge import doctor; doctor.examine()", ("torch", "cupy", "jax", "grpc")),
    ],
)
def test_importing_loads_nothing_heavy(statement, unwanted):
    modules, maps = loaded_by(statement)
    assert not modules.intersection(unwanted)
    if "doctor.examine" not in statement:
        assert "libcuda" not in maps


def test_imports_are_recorded():
    modules, maps = loaded_by("import numpy, asyncio")
    assert {"numpy", "asyncio"} <= modules
    assert "libc" in maps


def stub_side():
    """Every file that a stub's interpreter may load."""
    package = ROOT / "gpubridge"
    files = [path for name in STUB_SIDE for path in sorted((package / name).rglob("*.py"))]
    aliases = sorted(ROOT.glob("*_python_backend_utils/__init__.py"))
    return [package / "__init__.py", package / "errors.py", *files, *aliases]


def test_python_3_9_can_parse_what_a_stub_runs():
    """`ast.parse` raises SyntaxError where it cannot."""
    for path in stub_side():
        ast.parse(path.read_text(), str(path), feature_version=(3, 9))


def test_newer_syntax_is_seen():
    with pytest.raises(SyntaxError):
        ast.parse("match x:\n    case 1: pass\n", feature_version=(3, 9))
