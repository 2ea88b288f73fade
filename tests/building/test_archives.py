"""The way of a release: the source archive, a wheel made of it, and the tutorials with that, away from a checkout.

This is the build that ./dev test --gate makes; test_building.py has the others.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile

import pytest

from tests import first_answers
from tests.building.commands import run

pytestmark = [pytest.mark.building, pytest.mark.timeout(1800)]


def test_the_archives_that_an_index_takes(checkout, tmp_path):
    """A small source archive, a wheel made from it, and both run and described as an index wants."""
    venv, variables = tmp_path / "venv", dict(os.environ)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "venv", venv, cwd=tmp_path, variables=None)
    tools = ("build", "twine", "auditwheel")
    run(python, "-m", "pip", "install", "-q", *tools, cwd=tmp_path, variables=variables)
    # Without an option, build makes the wheel from the source archive.
    run(python, "-m", "build", "-o", tmp_path / "dist", checkout, cwd=tmp_path, variables=variables)
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with tarfile.open(source) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    assert {"pyproject.toml", "LICENSE", "gpubridge/schema/v2.binpb"} <= set(names)
    assert not [name for name in names if name.endswith((".png", ".jpg", "peer_http.json"))]
    assert source.stat().st_size < 1 << 20
    run(
        python, "-m", "twine", "check", "--strict", source, wheel, cwd=tmp_path, variables=variables
    )
    shown = run(python, "-m", "auditwheel", "show", wheel, cwd=tmp_path, variables=variables)
    assert re.search(r"manylinux_2_\d+_", shown), shown
    clean = tmp_path / "clean" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path, variables=None)
    run(clean, "-m", "pip", "install", "-q", wheel, cwd=tmp_path, variables=variables)
    model = next((checkout / "examples" / "add_sub" / "model_repository").iterdir())
    inputs = [f"--input=INPUT{i}=[1, 2, 3, 4]" for i in (0, 1)]
    command = (clean, "-m", "gpubridge", "run", model, *inputs)
    assert "OUTPUT0" in run(*command, cwd=tmp_path, variables=variables)
    # The newcomer's way by each tutorial, in folders where there is no checkout.
    client = "tritonclient[http]"
    run(clean, "-m", "pip", "install", "-q", client, cwd=tmp_path, variables=variables)
    for name, page in first_answers.PAGES.items():
        (tmp_path / name).mkdir()
        answer = first_answers.first_answer(page, tmp_path / name, clean.parent)
        assert (
            f"```json\n{answer}```" in page.read_text() or f"```\n{answer}```" in page.read_text()
        )
