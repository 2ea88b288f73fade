"""Builds the package where there is a C++ compiler, and where there is none.

The PEP 517 backend is scikit-build-core's. This wrapper asks for the ``ziglang`` wheel, whose compiler
``cmake/zig.cmake`` describes, when no C++20 compiler is found; one that the user has chosen (``CXX``,
``CMAKE_ARGS``, ``CMAKE_TOOLCHAIN_FILE``, ``-C cmake.define.CMAKE_CXX_COMPILER=...``) is taken as it is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

if TYPE_CHECKING:
    Settings = dict[str, str | list[str]] | None

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ZIG = ("ziglang>=0.13",)
_TOOLCHAIN = Path(__file__).with_name("zig.cmake")
_CHOICES = ("CMAKE_CXX_COMPILER", "CMAKE_TOOLCHAIN_FILE", "cmake.toolchain-file")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return the packages that a build needs, here with these settings."""
    return [*backend.get_requires_for_build_wheel(config_settings), *_zig_packages(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the packages that an editable build needs, here with these settings."""
    return [
        *backend.get_requires_for_build_editable(config_settings),
        *_zig_packages(config_settings),
    ]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; returns its name."""
    settings = _with_compiler(config_settings)
    name: str = backend.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that refers to this folder; returns its name."""
    settings = _with_compiler(config_settings)
    name: str = backend.build_editable(wheel_directory, settings, metadata_directory)
    return name


def _zig_packages(settings: Settings) -> tuple[str, ...]:
    return () if _is_chosen(settings) or _compilers.system_compiler() else _ZIG


def _with_compiler(settings: Settings) -> dict[str, str | list[str]]:
    """Return settings that name the compiler to use."""
    _check_headers()
    chosen = dict(settings or {})
    if _is_chosen(settings):
        return chosen
    compiler = _compilers.system_compiler()
    if compiler is not None:
        chosen["cmake.define.CMAKE_CXX_COMPILER"] = compiler
        return chosen
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise SystemExit(
            f"error: gpubridge needs a C++20 compiler: none of {', '.join(_compilers.COMPILERS)} is one, and "
            f"the ziglang package, which would do, is not installed; install either"
        )
    chosen["cmake.define.CMAKE_TOOLCHAIN_FILE"] = str(_TOOLCHAIN)
    chosen["cmake.define.GPUBRIDGE_ZIG"] = str(Path(found.origin).with_name("zig"))
    return chosen


def _check_headers() -> None:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise SystemExit(
            f"error: gpubridge needs the C headers of {sys.executable} and found no {header}; install "
            "them (Debian, Ubuntu: python3-dev; Fedora: python3-devel) or use a Python that has them"
        )


def _is_chosen(settings: Settings) -> bool:
    """Return True where the user has named a compiler."""
    named = [*(settings or {}), os.environ.get("CMAKE_ARGS", "")]
    return any(os.environ.get(name) for name in ("CXX", "CMAKE_TOOLCHAIN_FILE")) or any(
        choice in text for choice in _CHOICES for text in named
    )


def _load_compilers() -> Any:
    """Load the file that finds compilers, without the package, whose dependencies are absent here."""
    path = Path(__file__).parents[1] / "gpubridge/engine/environments/compilers.py"
    spec = importlib.util.spec_from_file_location("gpubridge_compilers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_compilers = _load_compilers()
