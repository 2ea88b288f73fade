"""./dev wheel: which programs run, what is kept, and what is said where a step fails."""

import sys

import pytest

from devtools import wheel
from devtools.console import Failed
from devtools.environment import Checkout

PLAIN, TAGGED = (
    "gpubridge-0.1.0-cp311-cp311-linux_x86_64.whl",
    "gpubridge-0.1.0-cp311-cp311-manylinux_2_35_x86_64.whl",
)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "need_only", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return Checkout(tmp_path, sys.executable, False, tmp_path / ".venv")


def programs(monkeypatch, *, pip=0, auditwheel=0):
    """Have pip and auditwheel write wheels, and end with these statuses."""

    def run(command, *, log=None, **_):
        status, name = (pip, PLAIN) if "pip" in command else (auditwheel, TAGGED)
        folder = command[command.index("-w") + 1]
        if log is not None:
            log.write_text("a line\nno policy\n")
        if status == 0:
            folder.mkdir(exist_ok=True)
            (folder / name).touch()
        return status

    monkeypatch.setattr(wheel, "run", run)


@pytest.mark.parametrize(("given", "folder"), [([], "dist"), (["here/there"], "here/there")])
def test_the_tagged_wheel_is_kept(checkout, monkeypatch, capsys, given, folder):
    programs(monkeypatch)
    wheel.wheel(checkout, given)
    assert [path.name for path in (checkout.root / folder).iterdir()] == [TAGGED]
    assert f"pip install {TAGGED}" in "".join(capsys.readouterr())


def test_a_wheel_without_a_tag_is_kept_and_said_to_be_for_this_machine(
    checkout, monkeypatch, capsys
):
    programs(monkeypatch, auditwheel=1)
    wheel.wheel(checkout, [])
    assert [path.name for path in (checkout.root / "dist").iterdir()] == [PLAIN]
    said = "".join(capsys.readouterr())
    assert "is for machines like this one" in said
    assert "no policy" in said


@pytest.mark.parametrize(
    ("given", "text"),
    [([], "could not be built"), (["a", "b"], "a folder at most, got a b"), (["-x"], "got -x")],
)
def test_what_fails_is_told(checkout, monkeypatch, given, text):
    programs(monkeypatch, pip=1)
    with pytest.raises(Failed, match=text):
        wheel.wheel(checkout, given)
    assert not (checkout.root / "dist").exists()
