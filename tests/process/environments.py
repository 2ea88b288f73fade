"""Environments for models under test: real ones of other Pythons, and small ones that borrow ours."""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.commands import run_command


def interpreter(minor):
    """Return the real binary of a Python on PATH, or None; a version manager's shim is asked for its."""
    shim = shutil.which(f"python3.{minor}")
    if shim is None:
        return None
    environment = dict(os.environ)
    if shutil.which("pyenv"):
        listed = run_command(["pyenv", "versions", "--bare"], check=True)
        environment["PYENV_VERSION"] = ":".join(listed.stdout.split())
    command = [shim, "-c", "import sys; print(sys.executable)"]
    found = run_command(command, env=environment)
    return found.stdout.strip() if found.returncode == 0 else None


def other_minors():
    """Minor versions of Python, from the oldest that a stub runs on, without our own."""
    return [minor for minor in range(9, 20) if minor != sys.version_info.minor]


def shared_environment(minor):
    """The environment of another Python with NumPy, made once for all runs of tests: none changes it.

    None where that Python is not on PATH.
    """
    python = interpreter(minor)
    if python is None:
        return None
    cache = Path(tempfile.gettempdir()) / f"gpubridge-environments-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    folder = cache / hashlib.sha256(python.encode()).hexdigest()[:16] / f"python3.{minor}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder.parent / "made"
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make_environment(python, folder, "numpy")
            made.touch()
    return folder


def make_environment(python, folder, *packages):
    """Make a virtual environment with some packages; returns its directory."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    if packages:
        # By the pip of the tests, which need not run on that Python: to make one takes seconds.
        (site,) = (folder / "lib").glob("python3.*/site-packages")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        version = site.parent.name.removeprefix("python")
        # Little of it is ever imported.
        options = ["--no-compile", "--only-binary=:all:", f"--python-version={version}"]
        subprocess.run([*pip, *options, f"--target={site}", *packages], check=True)
    return folder


def borrowing_environment(**scripts):
    """The files of an environment whose interpreter is ours: bytes by path, in ``bin/``."""
    files = {"python3": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', **scripts}
    return {f"bin/{name.replace('_', '-')}": text.encode() for name, text in files.items()}


def pack(path: Path, content) -> Path:
    """Pack a directory, or bytes by path, into a tar.gz; returns its path."""
    with tarfile.open(path, "w:gz", compresslevel=0) as packing:
        if isinstance(content, Path):
            packing.add(content, ".")
            return path
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            packing.addfile(info, io.BytesIO(data))
    return path


def environment_parameter(path):
    """The line of config.pbtxt that names an environment."""
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
