"""The compiled module's tests under ASan and UBSan, and replays of what fuzzing has kept: ``./dev sanitize``."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from devtools import compilers
from devtools.console import Failed, say, timed
from devtools.environment import Checkout, need, site_packages
from devtools.passed_lanes import note_pass
from devtools.processes import output_of, run

__all__ = ["DEFAULT_TESTS", "sanitize"]

DEFAULT_TESTS = ("-m", "plane", "tests/unit", "tests/fuzz")
"""What pytest is told where the developer names no tests."""
_COPIED = (
    "gpubridge",
    "triton_python_backend_utils",
    "c_python_backend_utils",
    "tests",
    "examples",
    "benchmarks",
    "devtools",
    "pyproject.toml",
)
# A warning of ASan (that it does not know greenlets, say) is no finding.
_FINDING = re.compile(r"ERROR: |runtime error: ")


@dataclass(frozen=True)
class _Lane:
    """A compiler, and the folder of what is built with it: CMake forgets its options when that changes."""

    checkout: Checkout
    compiler: str

    @property
    def place(self) -> Path:
        return self.checkout.root / "build" / "sanitize" / Path(self.compiler).name

    @property
    def copy(self) -> Path:
        """A copy of the working tree that has the instrumented module."""
        return self.place / "checkout"

    @property
    def is_clang(self) -> bool:
        return "clang" in output_of([self.compiler, "--version"])


def sanitize(checkout: Checkout, arguments: list[str]) -> None:
    """Build the module with the sanitizers, and run tests on it: those named, or all marked ``plane``."""
    compiler = compilers.choose_compiler("g++", "clang++", "clang++-19")
    if compiler is None:
        raise Failed("sanitizers need g++ or clang++ (apt-get install g++): nothing was tested")
    need(checkout, "test", "build")
    lane = _Lane(checkout, compiler)
    with timed(f"building with ASan and UBSan by {compiler}"):
        _build(lane)
    with timed("replaying what fuzzing has kept"):
        _replay(lane)
    with timed("pytest, instrumented"):
        passed = _test(lane, arguments or list(DEFAULT_TESTS))
    if _findings(lane.place) or not passed:
        raise Failed("sanitize found something")
    if not arguments:
        note_pass(checkout.root, "sanitize")
    say("the sanitizers found nothing")


def _build(lane: _Lane) -> None:
    """Build the module and the fuzzing targets, and put the module into a new copy of the tree."""
    root, tools = lane.checkout.root, lane.checkout.venv / "bin"
    shared = " -shared-libasan" if lane.is_clang else ""
    compilers.build(
        *(tools, lane.compiler, root, lane.place),
        "-DCMAKE_BUILD_TYPE=Sanitize",
        f"-DPython_EXECUTABLE={lane.checkout.runner}",
        "-DCMAKE_CXX_FLAGS=-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined "
        f"-fno-sanitize-recover=all{shared}",
    )
    compilers.build(tools, lane.compiler, root / "tests" / "fuzz" / "native", lane.place / "fuzz")
    shutil.rmtree(lane.copy, ignore_errors=True)
    lane.copy.mkdir()
    for name in _COPIED:
        _copy(root / name, lane.copy / name)
    install = [tools / "cmake", "--install", lane.place, "--prefix", lane.copy]
    if run(install, cwd=root, quiet=True):
        raise Failed(f"the module cannot be installed into {lane.copy}")
    # An environment that finds the copy, where the usual one's editable installation finds the tree.
    venv = lane.place / "venv"
    if not (venv / "bin" / "python").exists():
        run([lane.checkout.runner, "-m", "venv", "--without-pip", venv], cwd=root)
    lines = f"{lane.copy}\n{site_packages(lane.checkout.venv)}\n"
    (site_packages(venv) / "sanitize.pth").write_text(lines)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy(source, target)


def _replay(lane: _Lane) -> None:
    """Feed each kept input once to its target."""
    options = ["-runs=0"] if lane.is_clang else []
    for corpus in sorted((lane.checkout.root / "tests" / "fuzz" / "native" / "corpus").iterdir()):
        command = [lane.place / "fuzz" / corpus.name, *options, corpus]
        log = lane.place / f"replay-{corpus.name}.log"
        if run(command, cwd=lane.place, log=log):
            raise Failed(
                f"{corpus.name}: an input of {corpus} is answered wrongly:\n"
                f"{log.read_text(errors='replace')[-4000:]}"
            )


def _test(lane: _Lane, arguments: list[str]) -> bool:
    """Run pytest in the copy; return whether its tests passed."""
    for report in lane.place.glob("report.*"):
        report.unlink()
    runtime = f"libclang_rt.asan-{platform.machine()}.so" if lane.is_clang else "libasan.so"
    # ASan looks for the C++ library's functions when it starts: that has to be loaded then.
    loaded = [
        output_of([lane.compiler, f"-print-file-name={name}"])
        for name in (runtime, "libstdc++.so.6")
    ]
    reports = f"log_path={lane.place / 'report'}"
    variables = {
        **os.environ,
        "LD_PRELOAD": " ".join(loaded),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": f"detect_leaks=0:quarantine_size_mb=32:{reports}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{reports}",
    }
    options = ("-p", "no:cacheprovider", "--hypothesis-profile", "deep")
    spread = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")
    python = lane.place / "venv" / "bin" / "python"
    command = [python, "-m", "pytest", *options, *spread, *arguments]
    return run(command, cwd=lane.copy, variables=variables) == 0


def _findings(place: Path) -> bool:
    """Print the reports, also those of stubs, whose death a test may have waited for; return whether one is a finding."""
    found = False
    for report in sorted(place.glob("report.*")):
        text = report.read_text(errors="replace")
        print(text, flush=True)
        found = found or _FINDING.search(text) is not None
    return found
