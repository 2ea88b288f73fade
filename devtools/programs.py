"""Programs of the system that some tests need: installed where this may be done unasked, named where not."""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

from devtools.console import say, timed
from devtools.processes import find_program, run

__all__ = ["PACKAGES", "install_programs", "missing_packages"]

PACKAGES = {
    "chromium": "chromium",
    "curl": "curl",
    "h2load": "nghttp2-client",
    "node": "nodejs",
    "npm": "npm",
    "wrk": "wrk",
}
"""Each program, with its package in Debian and Ubuntu."""
_ALSO_NAMED = {"chromium": "chromium-browser"}
# A library of perf_analyzer, which the package index has without it.
_LIBRARIES = {"b64": "libb64-0d"}
_SECONDS = "600"


def missing_packages() -> list[str]:
    """Return the packages of the programs and libraries that are absent."""
    programs = [
        package
        for name, package in PACKAGES.items()
        if find_program(name, _ALSO_NAMED.get(name, "")) is None
    ]
    found = ctypes.util.find_library
    return programs + [package for name, package in _LIBRARIES.items() if found(name) is None]


def install_programs() -> None:
    """Install what is absent in CI (``CI`` is set) as root; elsewhere, or where that fails, say what is absent.

    On a developer's own machine nothing is installed unasked.
    """
    missing = missing_packages()
    if not missing:
        return
    command = "apt-get install " + " ".join(missing)
    if not os.environ.get("CI") or os.geteuid() != 0 or find_program("apt-get") is None:
        say(f"tests that need these programs are skipped: {command}")
        return
    with timed(command):
        _apt_get("update")
        for package in missing:
            if _apt_get("install", "-y", "--no-install-recommends", package):
                say(f"{package} could not be installed: tests that need it are skipped")


def _apt_get(*arguments: str) -> int:
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["timeout", _SECONDS, "apt-get", "-qq", *arguments]
    return run(command, cwd=Path("/"), variables=variables, quiet=True)
