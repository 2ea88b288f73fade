"""A file reads well up to 400 lines, a function up to 60."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gpubridge", "benchmarks", "examples", "tests", "csrc")
FILE_LINES = 400
FUNCTION_LINES = 60


def sources(*suffixes):
    """Every source file of the house, and every single one at the top."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts]


def too_long(path):
    """Say what in a file is longer than allowed."""
    text = path.read_text()
    complaints = []
    lines = len(text.splitlines())
    if lines > FILE_LINES:
        complaints.append(f"{path.name} has {lines} lines")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    complaints.append(f"{path.name}:{node.lineno} {node.name} has {length} lines")
    return complaints


@pytest.mark.parametrize(
    "path",
    sources(".py", ".cpp", ".h", ".cu", ".cuh"),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_and_functions_are_short(path):
    assert too_long(path) == []


def test_what_is_too_long_is_found(tmp_path):
    function = "def long():\n" + "    x = 1\n" * FUNCTION_LINES
    (tmp_path / "function.py").write_text(function)
    (tmp_path / "file.py").write_text("x = 1\n" * (FILE_LINES + 1))
    (tmp_path / "fits.py").write_text(function.replace("    x = 1\n", "", 1))
    assert too_long(tmp_path / "function.py") == ["function.py:1 long has 61 lines"]
    assert too_long(tmp_path / "file.py") == ["file.py has 401 lines"]
    assert too_long(tmp_path / "fits.py") == []
