"""A run tells what it skipped and what would bring it; a listed flaky test gets a second try, and no other does."""

import os
import re
import shutil
from collections import Counter
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import flaky, run_report
from tests.commands import PYTEST, run_command

ROOT = Path(__file__).parents[2]
UNTIL = datetime.now(tz=timezone.utc).date() + timedelta(days=2)
WHOLE_FILE = "import pytest\npytest.importorskip('openai_of_another_world', reason='needs openai')"
TESTS = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(3))
def test_with_a_browser(number):
    pytest.skip("h2load is not on PATH")

def test_of_a_package():
    pytest.importorskip("jax_of_another_world")

@pytest.fixture(scope="module")
def resource():
    yield []

def is_the_first(name):
    seen = Path(__file__).with_name(name)
    first = not seen.exists()
    seen.touch()
    return first

@pytest.mark.parametrize("number", [1])
def test_of_chance(number, tmp_path_factory, resource):
    assert not is_the_first("chance")

@pytest.mark.parametrize("number", [1])
def test_listed_with_its_parameters(number):
    assert not is_the_first("listed")

def test_that_is_not_listed():
    assert not is_the_first("not listed")

def test_that_fails_twice():
    assert 0
"""
LISTED = ("test_of_chance", "test_listed_with_its_parameters[1]", "test_that_fails_twice")


def run_pytest(folder, *options):
    """Run the tests of a folder with the plugins of this one; return what was printed."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(
        "import flaky\nfrom tests import run_report\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(run_report.RunReport())\n"
        "    config.pluginmanager.register(flaky)\n"
    )
    shutil.copy(ROOT / "tests" / "flaky.py", folder)
    return run_command(
        [*PYTEST, "-p", "xdist", *options, "--rootdir", folder, folder],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_names_what_it_skipped_and_runs_listed_tests_once_more(tmp_path, workers):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    listings = [f"test_it.py::{name} | Ann | races with a thread | {UNTIL}\n" for name in LISTED]
    (tmp_path / "flaky.txt").write_text("# a comment\n" + "".join(listings))
    done = run_pytest(tmp_path, "-n", workers)
    said = done.stdout
    assert "4 tests skipped: why, and what would bring them" in said, said + done.stderr
    assert "    3  h2load is not on PATH  ->  apt-get install nghttp2-client\n" in said
    assert "    1  could not import 'jax_of_another_world'" in said
    assert "1 files skipped as a whole" in said
    assert "    1  needs openai  ->  ./dev test-extra\n" in said
    assert "collecting took " in said
    assert done.returncode == 1
    assert "2 failed, 2 passed" in said
    assert "FAILED test_it.py::test_that_is_not_listed" in said
    assert "FAILED test_it.py::test_that_fails_twice" in said
    _, _, again = said.partition("flaky tests that failed and were run once more")
    assert (
        f"test_it.py::test_of_chance[1]: races with a thread (owner: Ann, until {UNTIL})" in again
    )
    for name in LISTED:
        assert f"test_it.py::{name}" in again


@pytest.mark.parametrize(
    ("reason", "way"),
    [
        ("could not import 'openai': No module named 'openai'", "./dev test-extra"),
        ("could not import 'nvidia.nvimgcodec': No module named 'nvidia'", "./dev test-extra"),
        ("could not import 'torch': No module named 'torch'", "pip install torch"),
        ("could not import 'furo': No module named 'furo'", "pip install --group docs"),
        ("could not import 'h2': No module named 'h2'", "./dev test installs it"),
        ("needs Chromium (apt-get install chromium)", ""),
        ("expected curl", "apt-get install curl"),
        ("npm is not on PATH", "apt-get install npm"),
        ("perf_analyzer is not on PATH", "./dev test-extra"),
        ("no GPU can be used: libcuda.so.1 is not there", run_report._GPU),
        ("something of another world", ""),
    ],
)
def test_reasons_have_a_way(reason, way):
    assert run_report.remedy(reason) == way


def test_the_most_frequent_reason_comes_first():
    lines = run_report.table(Counter({"one": 1, "expected curl": 12}))
    assert lines == ["   12  expected curl  ->  apt-get install curl", "    1  one"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("test_it.py::test_x | Ann | reason | 2020-01-31", "was to be steady by 2020-01-31"),
        ("test_it.py::test_x | Ann | 2099-01-31", "expected TEST | OWNER | REASON | YYYY-MM-DD"),
        ("test_it.py::test_x | Ann | | 2099-01-31", "expected TEST | OWNER | REASON | YYYY-MM-DD"),
        ("test_it.py::test_x | Ann | reason | soon", "Invalid isoformat string"),
    ],
)
def test_a_bad_or_old_listing_ends_the_run(tmp_path, monkeypatch, line, complaint):
    (tmp_path / "flaky.txt").write_text(line + "\n")
    monkeypatch.setattr(flaky, "_LIST", tmp_path / "flaky.txt")
    with pytest.raises(pytest.UsageError, match=re.escape(complaint)):
        flaky.pytest_configure(SimpleNamespace(stash={}))


def test_a_listing_holds_to_the_end_of_its_date():
    listings = flaky.parse("a | Ann | reason | 2026-05-05\n")
    assert flaky.expired(listings, date(2026, 5, 5)) == []
    assert [each.test for each in flaky.expired(listings, date(2026, 5, 6))] == ["a"]


def test_listed_tests_exist():
    listings = flaky.parse((ROOT / "tests" / "flaky.txt").read_text())
    assert [name for name in listings if not (ROOT / name.partition("::")[0]).exists()] == []
