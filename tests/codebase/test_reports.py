"""Reports of tests come from their worker whole, whatever text is in them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
TEST = r"""
import logging

def test_of_bad_text():
    logging.getLogger("any").error("logged \udc80")
    assert "got \udc81" == "expected \udc82"

def test_after_it():
    pass
"""


def test_a_text_that_is_no_unicode_ends_no_worker(tmp_path):
    pytest.importorskip("xdist")
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-p", "no:cacheprovider"]
    done = run_command(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_it.py::test_of_bad_text" in done.stdout
    for text in (r"logged \udc80", r"got \udc81", r"expected \udc82"):
        assert text in done.stdout
