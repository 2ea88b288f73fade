"""Random requests and configurations beside the real Triton: ``./dev test --peer``."""

from __future__ import annotations

import os
from pathlib import Path

from devtools.console import say, timed
from devtools.environment import Checkout, need
from devtools.processes import run

__all__ = ["test_peer"]

# Its server has Triton 2.51; with NumPy 2 the outputs of its models are empty.
_PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2")
_WITH_STUB = """
import glob, os, shutil, sys, sysconfig
root = os.path.join(sysconfig.get_path("purelib"), "pytriton", "tritonserver")
version = "%d.%d" % sys.version_info[:2]
name = "triton_python_backend_stub"
stub = os.path.join(root, "backends", "python", name)
shutil.copy(os.path.join(root, "python_backend_stubs", version, name), stub)
for path in (stub, os.path.join(root, "bin", "tritonserver")):
    os.chmod(path, 0o755)
"""
# Requests, configurations, and the most seconds of each.
_LEVELS = {"small": (1500, 40, 45), "all": (30_000, 1000, 3600)}


def test_peer(checkout: Checkout, arguments: list[str]) -> int:
    """Compare both servers; return 0 if nothing differs without a reason, or there is no Triton here.

    ``arguments``: ``small`` or ``all``, then options of ``python -m tests.conformance.differential``.
    """
    need(checkout, "test")
    level = arguments[0] if arguments and arguments[0] in _LEVELS else "small"
    rest = arguments[1:] if arguments[:1] == [level] else arguments
    peer = _need_peer(checkout)
    if peer is None:
        say(
            "LEFT OUT: the package index has no Triton for this machine (x86-64, CPython 3.8 to 3.12)"
        )
        return 0
    requests, configurations, seconds = _LEVELS[level]
    counts = (
        f"--requests={requests}",
        f"--configurations={configurations}",
        f"--seconds={seconds}",
    )
    module = ("-m", "tests.conformance.differential", "--peer", peer)
    with timed(f"{requests} requests and {configurations} configurations beside Triton"):
        return run([checkout.runner, *module, *counts, *rest], cwd=checkout.root)


def _need_peer(checkout: Checkout) -> Path | None:
    """Return the folder with Triton's environment, ``GPUBRIDGE_PEER`` if that is set; None without one."""
    given = os.environ.get("GPUBRIDGE_PEER")
    if given:
        return Path(given)
    folder = checkout.root / "build" / "peer"
    python = folder / "venv" / "bin" / "python"
    if (folder / "ready").exists():
        return folder
    with timed(f"installing Triton in {folder}: 400 MB"):
        steps = (
            [checkout.runner, "-m", "venv", "--clear", folder / "venv"],
            [python, "-m", "pip", "install", "-q", *_PACKAGES],
            [python, "-c", _WITH_STUB],
        )
        if any(run(step, cwd=checkout.root) for step in steps):
            return None
    (folder / "ready").touch()
    return folder
