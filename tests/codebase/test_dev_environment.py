"""./dev brings its environment up to date when what that was made from has changed, and only then."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devtools import environment, extra, fingerprints, programs
from devtools.console import Failed
from devtools.environment import Checkout

ROOT = Path(__file__).parents[2]
PROJECT = """
[project]
name = "x"

[dependency-groups]
test = ["pytest"]

[tool.ruff]
line-length = 100
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A checkout whose installers only note what they would install; returns it and their notes."""
    checkout = Checkout(tmp_path, sys.executable, False, tmp_path / ".venv")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int a;")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout.venv], check=True)
    (checkout.venv / ".gpubridge-dev").touch()
    notes = []
    monkeypatch.setattr(environment, "_INSTALLERS", {"package": lambda _, part: notes.append(part)})
    monkeypatch.setattr(environment, "_install_group", lambda _, part: notes.append(part))
    monkeypatch.setattr(environment, "_compile", lambda checkout: None)
    monkeypatch.setattr(environment, "_PIP_IS_OLD", "raise SystemExit(1)")
    return checkout, notes


def test_parts_are_installed_again_when_their_sources_change(installed):
    checkout, notes = installed
    newer = PROJECT.replace("pytest", "pytest>=8")
    for name, text, stale in (
        ("pyproject.toml", PROJECT, ["package", "test"]),
        ("csrc/a.cpp", "int a;", []),
        ("csrc/a.cpp", "int b;", ["package"]),
        ("csrc/b.h", "int b;", ["package"]),
        ("csrc/__pycache__/b.pyc", "", []),
        ("README.md", "", []),
        ("pyproject.toml", newer, ["package", "test"]),
        ("pyproject.toml", newer.replace("100", "99"), ["package"]),
    ):
        path = checkout.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        notes.clear()
        environment.need(checkout, "test")
        assert notes == stale, name


def test_parts_that_do_without_the_package_do_not_have_it_compiled(installed, monkeypatch):
    checkout, notes = installed
    monkeypatch.setattr(environment, "_compile", lambda _: notes.append("compiled"))
    environment.need_only(checkout, "test")
    assert notes == ["test"]
    environment.need(checkout, "test")
    assert notes == ["test", "package", "compiled"]


def test_a_part_that_could_not_be_installed_is_tried_again(installed, monkeypatch):
    checkout, notes = installed

    def fail(_, part):
        raise Failed(part)

    with monkeypatch.context() as patch:
        patch.setattr(environment, "_install_group", fail)
        with pytest.raises(Failed):
            environment.need(checkout, "test")
    environment.need(checkout, "test")
    assert notes == ["package", "test"], "the package was there"


def test_the_table_of_groups_is_found_in_the_real_file():
    groups = fingerprints.section_of((ROOT / "pyproject.toml").read_text(), "dependency-groups")
    assert groups.startswith("test = [")
    assert "\nextra = [" in groups
    assert "[tool." not in groups


def test_a_fingerprint_knows_names_and_bytes(tmp_path):
    seen = set()
    for name, text in (("a", "xy"), ("ax", "y"), ("a", "x"), ("b", "x")):
        (tmp_path / name).write_text(text)
        seen.add(fingerprints.digest_of_files(tmp_path, [name]))
        seen.add(fingerprints.digest_of_texts(name, text))
    assert len(seen) == 8


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_program_ends_by_itself_after_a_signal(tmp_path, name, status):
    """Ctrl-C and SIGTERM reach the program that runs, which is waited for: nothing is left behind."""
    child = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])
open("ready", "w").close()
signal.sigwait([signal.{name}])
open("seen", "w").close()
"""
    runner = """
import signal, sys
from devtools import processes
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    processes.run([sys.executable, "-c", sys.argv[1]], cwd=Path.cwd())
except KeyboardInterrupt:
    sys.exit(130)
"""
    running = subprocess.Popen(
        [sys.executable, "-c", runner, child],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        while not (tmp_path / "ready").exists():
            assert running.poll() is None
        if name == "SIGINT":
            # As a terminal does.
            os.killpg(running.pid, signal.SIGINT)
        else:
            running.terminate()
        assert running.wait(60) == status
        assert (tmp_path / "seen").exists()
    finally:
        if running.returncode is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def test_missing_programs_are_named_and_not_installed_at_home(monkeypatch, capfd):
    ran = []
    monkeypatch.setattr(programs, "find_program", lambda *names: None)
    monkeypatch.setattr(programs, "run", lambda command, **_: ran.append(command))
    monkeypatch.delenv("CI", raising=False)
    programs.install_programs()
    said = capfd.readouterr().err
    for package in ("chromium", "nghttp2-client", "nodejs", "npm", "wrk"):
        assert package in said
    assert not ran


def test_missing_programs_are_installed_in_ci_and_failures_are_no_error(monkeypatch, capfd):
    ran = []
    found = {"apt-get": "/usr/bin/apt-get", "curl": "/usr/bin/curl"}
    monkeypatch.setattr(programs, "find_program", lambda *names: found.get(names[0]))
    monkeypatch.setattr(programs, "run", lambda command, **_: ran.append(command) or 100)
    monkeypatch.setattr(programs.os, "geteuid", lambda: 0)
    monkeypatch.setenv("CI", "true")
    programs.install_programs()
    assert "update" in ran[0]
    installed = [command[-1] for command in ran[1:]]
    assert "chromium" in installed
    assert "curl" not in installed
    assert "chromium could not be installed" in capfd.readouterr().err


def test_the_extra_environment_is_found_first():
    variables = extra.Extra(Path("/somewhere")).variables()
    assert variables["PATH"].startswith("/somewhere/bin:")
    assert variables["NODE_PATH"] == "/somewhere/node_modules"
