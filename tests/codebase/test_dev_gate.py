"""The gate fails early, and trusts no lane whose sources are not those that it passed with."""

import json
import shutil
from pathlib import Path

import pytest

from devtools import compilers, console, fuzzing, gate, passed_lanes, sanitizers
from devtools.console import Failed
from devtools.environment import Checkout

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    for name in ("csrc", "cmake", "tests/fuzz/native", "gpubridge/schema", ".ci"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "csrc" / "a.cpp").write_text("int a;")
    return Checkout(tmp_path, "python3", False, tmp_path / ".venv")


@pytest.fixture
def ran(monkeypatch):
    """The lanes that the gate runs, none of which does anything."""
    names = []
    monkeypatch.setenv("CI", "")
    for name in ("check", "run_everything", "sanitize", "_build"):
        monkeypatch.setattr(gate, name, lambda *_, name=name: names.append(name))
    return names


def test_checks_come_first_and_end_a_gate_that_fails(checkout, ran, monkeypatch):
    gate.gate(checkout, [])
    assert ran == ["check", "run_everything", "sanitize", "_build"]
    ran.clear()

    def fail(*_):
        raise Failed("found something")

    monkeypatch.setattr(gate, "check", fail)
    with pytest.raises(Failed):
        gate.gate(checkout, [])
    assert ran == []


def test_a_lane_that_passed_runs_again_when_its_sources_change(checkout, ran):
    for lane in passed_lanes.LANES:
        passed_lanes.note_pass(checkout.root, lane)
    gate.gate(checkout, [])
    assert ran == ["check", "run_everything"]
    ran.clear()
    (checkout.root / "tests" / "fuzz" / "native" / "target.cpp").write_text("int b;")
    gate.gate(checkout, [])
    assert ran == ["check", "run_everything", "sanitize"]
    ran.clear()
    (checkout.root / "csrc" / "a.cpp").write_text("int b;")
    gate.gate(checkout, [])
    assert ran == ["check", "run_everything", "sanitize", "_build"]


def test_a_failed_build_is_not_recorded(checkout, ran, monkeypatch):
    def fail(*_):
        raise Failed("cannot be built")

    monkeypatch.setattr(gate, "_build", fail)
    with pytest.raises(Failed):
        gate.gate(checkout, [])
    assert not passed_lanes.has_passed(checkout.root, "building")


@pytest.mark.parametrize("record", ["", "[]", "{", '{"sanitize": null}', "\udc80"])
def test_a_record_that_says_nothing_is_no_pass(checkout, record):
    path = checkout.root / passed_lanes.RECORD
    path.write_bytes(record.encode(errors="surrogateescape"))
    assert not passed_lanes.has_passed(checkout.root, "sanitize")
    passed_lanes.note_pass(checkout.root, "sanitize")
    assert passed_lanes.has_passed(checkout.root, "sanitize")
    assert not passed_lanes.has_passed(checkout.root, "building")


@pytest.mark.parametrize("lane", passed_lanes.LANES)
def test_each_source_of_a_lane_exists_and_counts(lane, tmp_path):
    for name in passed_lanes.LANES[lane]:
        assert (ROOT / name).exists(), name
    for name in ("csrc", "cmake", "CMakeLists.txt", "pyproject.toml", "gpubridge/schema", "dev"):
        assert name in passed_lanes.LANES[lane]
    assert {"devtools", ".ci/run"} < {*passed_lanes.LANES[lane]}


def test_the_record_is_no_source_of_a_lane():
    assert not [
        name
        for names in passed_lanes.LANES.values()
        for name in names
        if name in (".", ".ci", str(passed_lanes.RECORD))
    ]


def test_everything_runs_to_its_end_and_names_what_failed(checkout, ran, monkeypatch, capfd):
    def fail(*_):
        raise Failed("one finding")

    monkeypatch.setattr(gate, "sanitize", fail)
    monkeypatch.setattr(gate, "test_fleet", lambda *_: 1)
    for name in ("coverage", "test_versions", "test_peer"):
        monkeypatch.setattr(gate, name, lambda *_, name=name: ran.append(name))
    monkeypatch.setattr(gate, "test", lambda _, options: ran.extend(options))
    with pytest.raises(Failed, match=r"^sanitize, fleet: "):
        gate.test_all(checkout, [])
    lanes = ["--gc-often", "--switch-often"]
    behind = ["test_versions", "test_peer", "coverage"]
    assert ran == ["check", "run_everything", *lanes, "_build", *behind]
    assert "error: one finding" in capfd.readouterr().err


def test_the_hosted_workflow_runs_everything_twice_a_day():
    text = (ROOT / ".github" / "workflows" / "everything.yml").read_text()
    (line,) = [line for line in text.splitlines() if "cron:" in line]
    assert len(line.split('"')[1].split()[1].split(",")) == 2, "two hours of each day"
    assert "run: ./dev test --all" in text


def test_sanitizers_fail_without_a_compiler(checkout, monkeypatch):
    monkeypatch.setattr(compilers, "find_program", lambda *names: None)
    with pytest.raises(Failed, match="nothing was tested"):
        sanitizers.sanitize(checkout, [])


def test_a_report_of_a_sanitizer_is_a_finding_and_a_warning_is_none(tmp_path, capfd):
    (tmp_path / "report.1").write_text("==1==WARNING: ASan does not know this")
    assert not sanitizers._findings(tmp_path)
    (tmp_path / "report.2").write_text("a.cpp:1: runtime error: overflow")
    assert sanitizers._findings(tmp_path)
    assert "overflow" in capfd.readouterr().out


def test_fuzzing_feeds_the_targets_and_nothing_else(checkout, monkeypatch):
    commands = []
    corpus = checkout.root / "tests" / "fuzz" / "native" / "corpus"
    for name in ("head", "message"):
        (corpus / name).mkdir(parents=True)
    monkeypatch.setattr(compilers, "find_program", lambda *names: shutil.which("true"))
    monkeypatch.setattr(compilers, "build", lambda *_: None)
    monkeypatch.setattr(fuzzing, "need", lambda *_: None)
    monkeypatch.setattr(fuzzing, "run", lambda command, **_: commands.append(command) or 0)
    fuzzing.fuzz(checkout, ["7"])
    assert [Path(command[0]).name for command in commands] == ["head", "message"]
    assert all("-max_total_time=7" in command for command in commands)
    with pytest.raises(Failed, match="unknown target: body; expected one of head message"):
        fuzzing.fuzz(checkout, ["body"])


def test_steps_go_on_after_a_failure(capfd):
    seen = []
    with pytest.raises(Failed, match=r"^b, c: look$"):
        console.run_steps(
            [(name, lambda name=name: seen.append(name) or name == "a") for name in "abc"], "look"
        )
    assert seen == ["a", "b", "c"]


def test_the_record_of_this_tree_is_readable():
    path = ROOT / passed_lanes.RECORD
    assert {*json.loads(path.read_text())} <= {*passed_lanes.LANES}
