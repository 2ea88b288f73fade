"""The virtual environment of a checkout: made when it is needed, and brought up to date with its sources."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from devtools.compilers import cached
from devtools.console import Failed, say, timed
from devtools.fingerprints import NATIVE_SOURCES, digest_of_files, digest_of_texts, section_of
from devtools.processes import find_program, output_of, run

__all__ = ["Checkout", "has_module", "left_out", "need", "need_only", "site_packages"]

_PACKAGES = ("gpubridge", "triton_python_backend_utils", "c_python_backend_utils")
_VERSION = "import sys; sys.exit(sys.version_info < (3, 10))"
_PIP_IS_OLD = (
    "import pip; raise SystemExit(tuple(map(int, pip.__version__.split('.')[:2])) >= (25, 1))"
)
# What cmake/build_backend.py asks for on this machine: CMake, Ninja, or a compiler, where it has none.
_BUILD_NEEDS = (
    "import sys; sys.path.insert(0, 'cmake'); import build_backend; "
    "print('\\n'.join(build_backend.get_requires_for_build_editable()))"
)


@dataclass(frozen=True)
class Checkout:
    """A working tree, and the interpreter and environment that its commands use."""

    root: Path
    python: str
    """The interpreter that makes environments."""
    python_is_chosen: bool
    """Whether the developer has named it by ``PYTHON``."""
    venv: Path

    @classmethod
    def of(cls, root: str, python: str) -> Checkout:
        """Return the checkout of a folder, with what this process's variables say."""
        folder = Path(root)
        # A virtual environment's programs name it by its absolute path.
        venv = Path.cwd() / (os.environ.get("GPUBRIDGE_VENV") or folder / ".venv")
        return cls(folder, python, bool(os.environ.get("PYTHON")), venv)

    @property
    def runner(self) -> Path:
        """The environment's interpreter."""
        return self.venv / "bin" / "python"


def need(checkout: Checkout, *groups: str) -> None:
    """Bring the environment up to date: the package itself, and dependency groups or what `_INSTALLERS` names."""
    need_only(checkout, "package", *groups)
    _compile(checkout)


def need_only(checkout: Checkout, *parts: str) -> None:
    """Bring these parts of the environment up to date: without ``package`` nothing is compiled for it."""
    _make(checkout)
    wanted = {part: _fingerprint(checkout, part) for part in parts}
    stale = [part for part, mark in wanted.items() if _read(_stamp(checkout, part)) != mark]
    # pip knows dependency groups since 25.1.
    old = stale and run([checkout.runner, "-c", _PIP_IS_OLD], cwd=checkout.root, quiet=True) == 0
    if old and _pip(checkout, "install", "-qq", "--upgrade", "pip>=25.1"):
        raise Failed("pip could not be updated; see its message above")
    for part in stale:
        _INSTALLERS.get(part, _install_group)(checkout, part)
        _stamp(checkout, part).write_text(wanted[part])


def has_module(checkout: Checkout, name: str) -> bool:
    """Return whether the environment has a module, without importing it."""
    code = f"import importlib.util as i; raise SystemExit(not i.find_spec('{name}'))"
    return run([checkout.runner, "-c", code], cwd=checkout.root, quiet=True) == 0


def left_out(checkout: Checkout, part: str, module: str, example: str) -> None:
    """Say that an example is left out for lack of a module, and have its part installed the next time."""
    _stamp(checkout, part).unlink(missing_ok=True)
    say(
        f"LEFT OUT: examples/{example}, as {module} could not be installed; with an index that has it, "
        "run ./dev demo again"
    )


def site_packages(venv: Path) -> Path:
    """Return the folder of a virtual environment's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(output_of([venv / "bin" / "python", "-c", code]))


def _make(checkout: Checkout) -> None:
    venv = checkout.venv
    if os.path.lexists(venv) and not _is_usable(checkout):
        if not (venv / ".gpubridge-dev").exists():
            raise Failed(
                f"{venv} cannot be used (its Python is too old, gone, or not PYTHON) and was not made by "
                "./dev: remove it, or set GPUBRIDGE_VENV to another place"
            )
        say(f"removing {venv}: its Python is gone or is not the one asked for")
        shutil.rmtree(venv)
    if venv.exists():
        return
    with timed(f"making {venv} with {output_of([checkout.python, '-V'])}"):
        if run([checkout.python, "-m", "venv", venv], cwd=checkout.root):
            shutil.rmtree(venv, ignore_errors=True)
            raise Failed(
                f"{checkout.python} cannot make a virtual environment; install its venv module "
                "(Debian, Ubuntu: python3-venv)"
            )
    (venv / ".gpubridge-dev").touch()


def _is_usable(checkout: Checkout) -> bool:
    """Return whether the environment's interpreter runs and is the one that was asked for, if one was."""
    try:
        if run([checkout.runner, "-c", _VERSION], cwd=checkout.root, quiet=True):
            return False
    except OSError:
        return False
    return not checkout.python_is_chosen or _version(checkout.runner) == _version(checkout.python)


def _version(python: str | Path) -> str:
    return output_of([python, "-VV"])


def _stamp(checkout: Checkout, part: str) -> Path:
    return checkout.venv / f".gpubridge-{part}"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _fingerprint(checkout: Checkout, part: str) -> str:
    """Return the fingerprint of what a part of the environment is made from."""
    version = _version(checkout.runner)
    if part == "package":
        sources = digest_of_files(checkout.root, NATIVE_SOURCES)
        return digest_of_texts(str(checkout.root), version, sources)
    project = checkout.root / "pyproject.toml"
    return digest_of_texts(version, section_of(_read(project), "dependency-groups"))


def _install_package(checkout: Checkout, _: str) -> None:
    """Build the module with the environment's own tools: so CMake compiles only what has changed since."""
    _install_group(checkout, "build")
    if find_program("c++", "g++", "clang++") is None:
        say(
            "no C++ compiler: the ziglang wheel's is used, which takes some minutes more the first time"
        )
    with timed(
        "installing gpubridge (editable) and what it needs: compiling its module takes minutes"
    ):
        needs = output_of([checkout.runner, "-c", _BUILD_NEEDS], cwd=checkout.root).split("\n")
        failed = _pip(checkout, "install", "-qq", *filter(None, needs)) if any(needs) else 0
        options = ("-qq", "--no-build-isolation", "--editable", ".")
        if failed or _pip(checkout, "install", *options):
            raise Failed("installing (package) failed; see pip's message above")


def _pip(checkout: Checkout, *arguments: str) -> int:
    """Run the environment's pip in the checkout; return its exit status. What it compiles, ccache keeps."""
    command = [checkout.runner, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return run([*command, *arguments], cwd=checkout.root, variables=cached(checkout.root))


def _install_group(checkout: Checkout, group: str) -> None:
    with timed(f"installing the {group} tools"):
        if _pip(checkout, "install", "-qq", "--group", group):
            raise Failed(f"installing ({group}) failed; see pip's message above")


def _install_torch(checkout: Checkout, _: str) -> None:
    """Install a CPU build of the named release where one is configured; otherwise any PyTorch will do."""
    with timed("installing torch for the examples that use it"):
        if _pip(checkout, "install", "-qq", "torch==2.13.0") and _pip(
            checkout, "install", "-q", "torch"
        ):
            say("torch could not be installed: the examples that use it will not run")


def _install_demo(checkout: Checkout, _: str) -> None:
    """Install the files of packages that the demo needs, and none of what their code would need."""
    with timed("installing rapidocr and wordllama, for their networks: 50 MB"):
        for names in ("rapidocr==3.10.*",), ("wordllama==0.4.*", "tokenizers", "safetensors"):
            if _pip(checkout, "install", "-qq", "--no-deps", "--only-binary", ":all:", *names):
                say(f"{' '.join(names)} could not be installed")


_INSTALLERS: dict[str, Callable[[Checkout, str], None]] = {
    "package": _install_package,
    "torch": _install_torch,
    "demo": _install_demo,
}


def _compile(checkout: Checkout) -> None:
    """Compile what has changed, as pip does for an installed package.

    With ``PYTHONDONTWRITEBYTECODE`` every server and every stub would compile its modules anew.
    """
    command = [checkout.runner, "-m", "compileall", "-q", *_PACKAGES]
    if run(command, cwd=checkout.root):
        say("the package's modules could not be compiled: processes start more slowly")
