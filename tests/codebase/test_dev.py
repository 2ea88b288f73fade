"""./dev refuses what it cannot do, and removes no environment but its own."""

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from devtools import commands, environment as environments, testing
from devtools.commands import COMMANDS, USAGE
from devtools.console import Failed
from devtools.environment import Checkout
from tests.commands import run_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A folder with nothing but the program."""
    shutil.copy(ROOT / "dev", tmp_path)
    shutil.copytree(ROOT / "devtools", tmp_path / "devtools")
    return tmp_path


def dev(checkout, *arguments, **variables):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "GPUBRIDGE_VENV")}
    return run_command([checkout / "dev", *arguments], cwd="/", env=environment | variables)


def interpreter(path):
    """Write a program that is no Python that would do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return str(path)


def environment(folder, *, ours):
    """Make a virtual environment whose interpreter is useless."""
    interpreter(folder / "bin" / "python")
    (folder / "keep").write_text("")
    if ours:
        (folder / ".gpubridge-dev").write_text("")
    return folder


@pytest.mark.parametrize("place", [".venv", "elsewhere"])
def test_an_environment_of_somebody_else_stays(checkout, place):
    folder = environment(checkout / place, ours=False)
    refused = dev(checkout, "serve", PYTHON=sys.executable, GPUBRIDGE_VENV=str(folder))
    assert refused.returncode == 1
    assert "was not made by ./dev" in refused.stderr
    assert (folder / "keep").exists()


def test_a_wrong_interpreter_removes_nothing(checkout):
    folder = environment(checkout / ".venv", ours=True)
    refused = dev(checkout, "serve", PYTHON=interpreter(checkout / "python2"))
    assert refused.returncode == 1
    assert "expected Python 3.10 or newer" in refused.stderr
    assert (folder / "keep").exists()


def test_its_own_useless_environment_is_made_again(checkout, monkeypatch, capfd):
    folder = environment(checkout / ".venv", ours=True)
    # An environment without pip is made sooner, and installs nothing.
    run = environments.run
    monkeypatch.setattr(
        environments,
        "run",
        lambda words, **options: run(
            [*words, *(["--without-pip"] if "venv" in words else [])], **options
        ),
    )
    with pytest.raises(Failed):
        environments.need(Checkout(checkout, sys.executable, True, folder))
    said = capfd.readouterr().err
    assert f"removing {folder}" in said
    assert re.search(rf"making {folder} with Python 3\.\d+", said)
    assert re.search(rf"done in [\d.]+ s: making {folder}", said)
    assert not (folder / "keep").exists()
    assert (folder / ".gpubridge-dev").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--forever"], "unknown option of demo: --forever; expected --stay or none"),
        (["docs", "--all"], "unknown option of docs: --all; expected --external or none"),
        (["test", "--gate", "--fast"], "unknown argument of test --gate: --fast; expected none"),
        (["test", "--all", "-k", "x"], "unknown argument of test --all: -k; expected none"),
        (["fuzz", "1", "2"], "expected fuzz [TARGET] [SECONDS], got 1 2"),
        (["gpu", "speed"], "unknown part of gpu: speed; expected first, second, none for both, or"),
        (
            ["gpu", "first", "-k", "x"],
            "unknown argument of gpu: -k; expected --output, --wheels or",
        ),
        (["tset"], "unknown command: tset"),
    ],
)
def test_what_is_unknown_is_named(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        commands.main(str(tmp_path), sys.executable, words)
    assert ended.value.code == 1
    assert f"error: {said}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_place_of_the_working_folder_changes_nothing(checkout):
    (checkout / "elsewhere").mkdir()
    # A module of this name in the folder where the command is given is not the standard library's.
    (checkout / "elsewhere" / "signal.py").write_text("raise SystemExit(3)")
    shown = run_command([checkout / "dev"], cwd=checkout / "elsewhere", check=True)
    assert shown.stdout == USAGE


def test_the_help_has_every_command():
    named = re.findall(r"^  ([a-z][a-z-]+) ", USAGE, re.MULTILINE)
    assert {*named} - {"help"} == {*COMMANDS}


@pytest.mark.parametrize(("arguments", "times"), [([], 2), (["-k", "arena"], 1)])
def test_tests_of_both_runtimes_run_again_without_the_module(monkeypatch, arguments, times):
    ran = []

    def run(command, *, cwd, variables):
        ran.append((set(map(Path, command)), variables.get("GPUBRIDGE_NO_NATIVE")))
        return 0

    monkeypatch.setattr(testing, "run", run)
    monkeypatch.setattr(testing, "need", lambda *_: None)
    monkeypatch.setattr(testing, "has_module", lambda *_: True)
    root = Path(__file__).parents[2]
    assert testing.test(SimpleNamespace(root=root, runner=sys.executable), arguments) == 0
    assert [without for _, without in ran] == [None, "1"][:times]
    if times == 2:
        assert root / "tests" / "unit" / "test_stub_outputs.py" in ran[1][0]
