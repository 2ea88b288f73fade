"""Compiles the simulated driver and what else tests have in C++, once for each state of its sources."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent / "csrc"
_FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]


@functools.cache
def build_driver() -> Path:
    """Return a folder with libcuda.so.1 in it; compiled if it is not there yet.

    Raises
    ------
    RuntimeError
        There is no compiler, and none could be installed; or the sources do not compile.
    """
    return build_library(
        "libcuda.so.1",
        sorted(_SOURCES.glob("*.cpp")),
        sorted(_SOURCES.iterdir()),
        ["-O1", "-g", "-pthread"],
    ).parent


@functools.cache
def build_compiler() -> Path:
    """Return a folder with a libnvrtc.so.12 in it, whose programs are what SIMCUDA_KERNEL names.

    Raises
    ------
    RuntimeError
        As `build_driver`.
    """
    source = _SOURCES.parent / "nvrtc" / "nvrtc.cpp"
    return build_library("libnvrtc.so.12", [source], [source], ["-O1"]).parent


@functools.cache
def build_management() -> Path:
    """Return a folder with a libnvidia-ml.so.1 in it; raises as `build_driver`."""
    source = _SOURCES.parent / "nvml" / "nvml.cpp"
    return build_library("libnvidia-ml.so.1", [source], [source], ["-O1"]).parent


def build_library(
    name: str, sources: Sequence[Path], inputs: Sequence[Path], flags: Sequence[str]
) -> Path:
    """Return the path of a shared library; it is made again when one of ``inputs`` has changed.

    Raises
    ------
    RuntimeError
        As `build_driver`.
    """
    digest = hashlib.sha256("\0".join(flags).encode())
    for file in inputs:
        digest.update(file.read_bytes())
    cache = Path(tempfile.gettempdir()) / f"gpubridge-simcuda-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / digest.hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            _compile(name, sources, folder, flags)
    return folder / name


def _compile(name: str, sources: Sequence[Path], folder: Path, flags: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    made = folder / f"{name}.new"
    # As one unit: the headers of the standard library are most of the work.
    unit = "".join(f'#include "{source}"\n' for source in sources)
    command = [*_compiler(), *_FLAGS, *flags, "-o", str(made), "-x", "c++", "-", "-ldl"]
    done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} does not compile:\n{done.stderr}")
    made.rename(folder / name)


def _compiler() -> list[str]:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return [name]
    # A compiler in a wheel, for machines without one.
    place = Path(tempfile.gettempdir()) / f"gpubridge-simcuda-{os.getuid()}" / "zig"
    if not place.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(place), "ziglang"]
        if subprocess.run(pip, check=False).returncode:
            shutil.rmtree(place, ignore_errors=True)
            raise RuntimeError(
                "no C++ compiler (c++, g++, clang++), and ziglang cannot be installed"
            )
    return ["env", f"PYTHONPATH={place}", sys.executable, "-m", "ziglang", "c++"]
