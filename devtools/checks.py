"""Format, lint, types and layers: ``./dev check``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from devtools.console import Failed, run_steps, say
from devtools.environment import Checkout, need
from devtools.processes import run

__all__ = ["check"]

_CPP = (
    "csrc/**/*.cpp",
    "csrc/**/*.h",
    "tests/fuzz/native/*.cpp",
    "tests/fuzz/native/*.h",
    "tests/simcuda/*/*.cpp",
    "tests/simcuda/*/*.h",
    "tests/host_kernel/csrc/*.cpp",
    "tests/host_kernel/csrc/*.h",
    "gpubridge/backends/*/*.cu",
    "gpubridge/backends/*/*.cuh",
)
_COMMANDS = {
    "ruff check": ("ruff", "check"),
    "ruff format": ("ruff", "format", "--check"),
    "mypy": ("mypy",),
    "lint-imports": ("lint-imports",),
    "lint-imports (cycles)": ("lint-imports", "--config", "tests/codebase/acyclic.toml"),
    "hadolint": ("hadolint", "deploy/Dockerfile", "deploy/Dockerfile.cuda"),
}


def check(checkout: Checkout, arguments: list[str]) -> None:
    """Look for faults that need no test; change nothing."""
    if arguments:
        raise Failed(f"unknown option of check: {arguments[0]}; expected none")
    need(checkout, "test", "lint")
    path = f"{checkout.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = {**os.environ, "PATH": path}

    def step(command: tuple[str, ...]) -> bool:
        # The program is looked for in this process's PATH.
        words = [str(checkout.venv / "bin" / command[0]), *command[1:]]
        return run(words, cwd=checkout.root, variables=variables) == 0

    sources = [str(path) for pattern in _CPP for path in sorted(checkout.root.glob(pattern))]
    commands = {**_COMMANDS, "clang-format": ("clang-format", "--dry-run", "--Werror", *sources)}
    steps: list[tuple[str, Callable[[], bool]]] = [
        (name, partial(step, command)) for name, command in commands.items()
    ]
    run_steps(
        steps, "found something (ruff check --fix, ruff format and clang-format -i mend much of it)"
    )
    say("nothing found")
