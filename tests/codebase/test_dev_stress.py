"""Stressed repetitions name the tests that failed, and leave no load behind; coverage may not fall."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from devtools import coverage, stress
from devtools.console import Failed
from devtools.environment import Checkout

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_x[1]" file="tests/a.py"/>
<testcase classname="tests.a" name="test_y" file="tests/a.py"><failure message="m">text</failure></testcase>
<testcase classname="tests.b" name="test_z"><error message="m"/></testcase>
<testcase classname="tests.b" name="test_s"><skipped message="m"/></testcase>
</testsuite></testsuites>"""
FILES = {
    "pkg/a.py": (100, 90, 20, 10),
    "pkg/b.py": (100, 80, 0, 0),
    "pkg/inner/c.py": (10, 10, 10, 9),
}
DOCUMENT = {
    "files": {
        name: {"summary": dict(zip(coverage._COUNTS, counts, strict=True))}
        for name, counts in FILES.items()
    }
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(stress, "need", lambda *_: None)
    return Checkout(tmp_path, sys.executable, False, tmp_path / ".venv")


def answer(monkeypatch, *outcomes):
    """Have runs of pytest end so, one after the other: (exit status, report); returns their arguments."""
    left, commands = list(outcomes), []

    def run_pytest(_, __, arguments):
        commands.append(arguments)
        (report,) = [word for word in arguments if word.startswith("--junitxml=")]
        status, text = left.pop(0)
        if text:
            Path(report.partition("=")[2]).write_text(text)
        return status

    monkeypatch.setattr(stress, "run_pytest", run_pytest)
    return commands


def test_failures_are_counted_by_test(checkout, monkeypatch, capfd):
    clean = "<testsuites/>"
    commands = answer(monkeypatch, (1, REPORT), (0, clean), (1, REPORT))
    assert stress.stress(checkout, ["tests/a.py", "-k", "x", "--repeat", "3"]) == 1
    said = capfd.readouterr().out
    assert said.splitlines()[0] == "failed, of 3 repetitions:"
    assert "   2  tests/a.py::test_y\n" in said
    assert "test_x" not in said
    assert "test_s" not in said
    assert all(command[-3:] == ["tests/a.py", "-k", "x"] for command in commands)


def test_no_failure_is_said(checkout, monkeypatch, capfd):
    commands = answer(monkeypatch, (0, "<testsuites/>"))
    assert stress.stress(checkout, ["--repeat", "1"]) == 0
    assert "1 repetitions, no failure" in capfd.readouterr().out
    assert commands[0][-1] == "tests/process"


def test_no_repetition_begins_when_the_time_is_over(checkout, monkeypatch):
    commands = answer(monkeypatch)
    stress.stress(checkout, ["--repeat", "5", "--seconds", "0"])
    assert commands == []


@pytest.mark.parametrize("outcome", [(4, ""), (3, "<testsuites/>"), (1, "<testsuites/>"), (5, "")])
def test_a_run_that_names_no_failure_ends_the_repetitions(checkout, monkeypatch, outcome):
    answer(monkeypatch, outcome)
    with pytest.raises(Failed, match=f"status {outcome[0]}"):
        stress.stress(checkout, ["--repeat", "2"])


def test_the_load_ends_with_its_block():
    with stress.load(2, 100) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode is not None for process in processes)


def test_the_load_ends_by_itself_when_its_time_is_over():
    with stress.load(1, 0) as (process,):
        assert process.wait(60) == 0


def test_the_load_ends_by_itself_when_its_parent_is_gone():
    # A process that is nobody's parent.
    command = [sys.executable, "-c", stress._BUSY, str(os.getppid()), "100"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_the_table_names_the_most_frequent_first():
    lines = stress.table(Counter({"a": 1, "b": 3}), 4).splitlines()
    assert [line.split() for line in lines[1:]] == [["3", "b"], ["1", "a"]]


def test_shares_are_those_of_packages():
    assert coverage.shares_of(DOCUMENT) == {
        "pkg": [85.0, 50.0],
        "pkg/inner": [100.0, 90.0],
        "all": [85.7, 63.3],
    }
    lines = coverage.table(DOCUMENT).splitlines()
    assert lines[-1].split() == ["all", "210", "85.7", "%", "30", "63.3", "%"]
    assert lines[1].split() == ["pkg", "200", "85.0", "%", "20", "50.0", "%"]


def test_a_package_below_its_floor_is_named():
    measured = {"a": [90.0, 80.0], "b": [50.0, 50.0]}
    assert coverage.fallen(measured, {"a": [90.4, 80.0], "gone": [99.0, 99.0]}) == []
    assert coverage.fallen(measured, {"a": [91.0, 80.0], "b": [50.0, 51.0]}) == [
        "a: expected 91.0 % of lines, got 90.0 %",
        "b: expected 51.0 % of branches, got 50.0 %",
    ]


def test_floors_only_rise_and_go_with_their_package(tmp_path, capfd):
    path = tmp_path / "floors.json"
    coverage._compare(path, {"a": [90.0, 80.0], "gone": [1.0, 1.0]})
    coverage._compare(path, {"a": [89.8, 85.0], "new": [70.0, 60.0]})
    assert json.loads(path.read_text()) == {"a": [90.0, 85.0], "new": [70.0, 60.0]}
    before = path.read_text()
    with pytest.raises(Failed, match=r"a: expected 85\.0 % of branches, got 84\.0 %"):
        coverage._compare(path, {"a": [95.0, 84.0]})
    assert path.read_text() == before
