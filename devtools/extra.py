"""An environment over the usual one, with packages and programs that few tests need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from devtools.console import Failed, say, timed
from devtools.environment import Checkout, need, site_packages
from devtools.fingerprints import digest_of_texts, section_of
from devtools.processes import find_program, output_of, run
from devtools.programs import install_programs

__all__ = ["Extra", "need_extra"]

_PERF_ANALYZER = """#!/bin/sh
LD_LIBRARY_PATH="{folder}/nvidia/cuda_runtime/lib" exec "{folder}/bin/perf_analyzer" "$@"
"""


@dataclass(frozen=True)
class Extra:
    """The environment's folder."""

    folder: Path

    @property
    def runner(self) -> Path:
        """Its interpreter, which finds the usual environment's packages, too."""
        return self.folder / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """Return variables with which perf_analyzer and grpc-js are found."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, "PATH": path, "NODE_PATH": str(self.folder / "node_modules")}


def need_extra(checkout: Checkout) -> Extra:
    """Make the environment, and bring it up to date where the groups of `pyproject.toml` have changed."""
    need(checkout, "test", "torch")
    install_programs()
    extra = Extra(checkout.root / "build" / "extra")
    stamp = extra.folder / ".gpubridge-extra"
    groups = section_of((checkout.root / "pyproject.toml").read_text(), "dependency-groups")
    version = output_of([checkout.runner, "-VV"])
    wanted = digest_of_texts(str(checkout.root), str(checkout.venv), version, groups)
    if stamp.exists() and stamp.read_text() == wanted:
        return extra
    with timed(f"installing what the tests marked extra need in {extra.folder}: 1 GB"):
        _install(checkout, extra)
    with timed("installing perf_analyzer and grpc-js"):
        _install_perf_analyzer(checkout, extra)
        _install_grpc_js(checkout, extra)
    stamp.write_text(wanted)
    return extra


def _install(checkout: Checkout, extra: Extra) -> None:
    made = output_of([extra.runner, "-VV"]) == output_of([checkout.runner, "-VV"])
    options = () if made else ("--clear",)
    command = [checkout.runner, "-m", "venv", *options, "--without-pip", extra.folder]
    if run(command, cwd=checkout.root):
        raise Failed(f"{extra.folder} cannot be made; see the message above")
    # As a line of code, because it also reads the .pth files there, the editable installation's.
    line = f"import site; site.addsitedir('{site_packages(checkout.venv)}')\n"
    (site_packages(extra.folder) / "usual.pth").write_text(line)
    # With the group of the usual environment, so that nothing here contradicts what lies there.
    if _pip(checkout, extra, "--group", "test", "--group", "extra"):
        raise Failed("installing (extra) failed; see pip's message above")
    # Where tests look for them: beside the interpreter.
    for name in ("gpubridge", "tritonserver"):
        (extra.folder / "bin" / name).unlink(missing_ok=True)
        (extra.folder / "bin" / name).symlink_to(checkout.venv / "bin" / name)


def _install_perf_analyzer(checkout: Checkout, extra: Extra) -> None:
    """Install the last release whose perf_analyzer runs with the libraries of Debian 12 and Ubuntu 22.04."""
    folder = extra.folder / "perf"
    names = ("tritonclient==2.50.0", "nvidia-cuda-runtime-cu12==12.*")
    # pip replaces nothing in a folder that it is told to fill.
    if not folder.exists() and _pip(checkout, extra, "--no-deps", "--target", str(folder), *names):
        say("perf_analyzer could not be installed")
        return
    program = extra.folder / "bin" / "perf_analyzer"
    program.write_text(_PERF_ANALYZER.format(folder=folder))
    program.chmod(0o755)
    if run([program, "--version"], cwd=checkout.root, quiet=True):
        say("perf_analyzer does not run here (x86-64, Debian, Ubuntu: apt-get install libb64-0d)")
        program.unlink()


def _install_grpc_js(checkout: Checkout, extra: Extra) -> None:
    npm = find_program("npm")
    options = ("--no-audit", "--no-fund", "--silent")
    command = [npm or "", "install", "--prefix", extra.folder, *options, "@grpc/grpc-js@1"]
    if npm is None or run(command, cwd=checkout.root):
        say("grpc-js could not be installed: it needs npm, and a registry that has it")


def _pip(checkout: Checkout, extra: Extra, *arguments: str) -> int:
    options = ("--disable-pip-version-check", "--no-input", "install", "-qq")
    return run([extra.runner, "-m", "pip", *options, *arguments], cwd=checkout.root)
