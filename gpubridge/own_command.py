"""Commands that run modules of this very gpubridge, whatever lies in the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """
import importlib.util, runpy, sys
home, module = sys.argv[1:3]
# Of this program, not of Python: the working directory may hold another gpubridge.
if sys.path[0] == "":
    del sys.path[0]
found = importlib.util.find_spec("gpubridge")
if found is None or not str(found.origin).startswith(home + "/gpubridge/"):
    sys.path.insert(0, home)
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def own_command(module: str) -> list[str]:
    """Return the beginning of a command that runs a module, in this interpreter."""
    home = str(Path(__file__).parents[1])
    return [sys.executable, "-c", _PROGRAM, home, module]
