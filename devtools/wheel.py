"""A wheel of the checkout, made once to be installed on other machines without compiling."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from devtools.compilers import cached
from devtools.console import Failed, say, timed
from devtools.environment import Checkout, need_only
from devtools.processes import run

__all__ = ["wheel"]


def wheel(checkout: Checkout, arguments: list[str]) -> None:
    """Make a wheel in a folder (``dist``), for the environment's Python and the C library of this machine."""
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        raise Failed(f"./dev wheel expects a folder at most, got {' '.join(arguments)}")
    target = Path.cwd() / arguments[0] if arguments else checkout.root / "dist"
    need_only(checkout, "wheel")
    with tempfile.TemporaryDirectory(prefix="gpubridge-wheel-") as folder:
        made = _build(checkout, Path(folder))
        # Tagged by the C library that it needs, so that pip takes it wherever it runs, and nowhere else.
        tagged = _tagged(checkout, made)
        target.mkdir(parents=True, exist_ok=True)
        kept = Path(shutil.copy2(tagged, target))
    say(f"{kept}\ninstall it anywhere: pip install {kept.name}")


def _build(checkout: Checkout, folder: Path) -> Path:
    with timed("compiling the module and packing the wheel: minutes the first time"):
        pip = [checkout.runner, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command = [*pip, "wheel", "-qq", "--no-deps", "-w", folder, checkout.root]
        if run(command, cwd=checkout.root, variables=cached(checkout.root)):
            raise Failed("the wheel could not be built; see pip's message above")
    (made,) = folder.glob("*.whl")
    return made


def _tagged(checkout: Checkout, made: Path) -> Path:
    """Return the wheel with the tag that auditwheel gives it (``manylinux_2_35``); the wheel itself if none."""
    folder = made.parent / "tagged"
    tools = f"{checkout.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = [checkout.runner, "-m", "auditwheel", "repair", "-w", folder, made]
    log = made.parent / "auditwheel.log"
    variables = {**os.environ, "PATH": tools}
    if run(command, cwd=checkout.root, variables=variables, log=log, quiet=True):
        say(
            f"{made.name} is for machines like this one: auditwheel knows no tag for it: "
            f"{log.read_text().strip().splitlines()[-1:]}"
        )
        return made
    (tagged,) = folder.glob("*.whl")
    return tagged
