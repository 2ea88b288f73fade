"""Compiles the simulated driver, once for each state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["build_driver"]

_SOURCES = Path(__file__).resolve().parent / "csrc"
_FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
]


def build_driver() -> Path:
    """Return a folder with libcuda.so.1 in it; compiled if it is not there yet.

    Raises
    ------
    RuntimeError
        There is no compiler, and none could be installed; or the sources do not compile.
    """
    sources = sorted(_SOURCES.glob("*.cpp"))
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.iterdir()):
        digest.update(file.read_bytes())
    cache = Path(tempfile.gettempdir()) / f"gpubridge-simcuda-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / digest.hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "libcuda.so.1").exists():
            _compile(sources, folder)
    return folder


def _compile(sources: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    made = folder / "libcuda.so.1.new"
    command = [*_compiler(), *_FLAGS, "-o", str(made), *map(str, sources), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated CUDA driver does not compile:\n{done.stderr}")
    made.rename(folder / "libcuda.so.1")


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
