"""Which versions of a model are there, and which of them its version policy serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["VersionPolicy", "available_versions", "select_versions", "served_versions"]

_VERSION_NAME = re.compile(r"[1-9][0-9]*")
_MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """The version policy of a model.

    Attributes
    ----------
    kind : {"latest", "all", "specific"}
    latest : int
        How many of the highest versions are served; only for ``"latest"``.
    versions : tuple of int
        The versions that are served where they exist; only for ``"specific"``.
    """

    kind: Literal["latest", "all", "specific"]
    latest: int = 0
    versions: tuple[int, ...] = ()


def available_versions(model_dir: Path) -> list[int]:
    """Return the version numbers of `model_dir`, ascending.

    A version is a directory whose name is a decimal number without sign or leading zero, from 1 to
    2**63 - 1. Everything else in the directory is ignored, as Triton documents it.

    Raises
    ------
    BridgeError
        ``NOT_FOUND`` when the directory cannot be listed.
    """
    try:
        entries = list(model_dir.iterdir())
    except OSError as error:
        raise BridgeError(
            f"cannot list the model directory {model_dir}: {error.strerror}", ErrorCode.NOT_FOUND
        ) from error
    return sorted(
        int(entry.name)
        for entry in entries
        if _VERSION_NAME.fullmatch(entry.name)
        and int(entry.name) <= _MAX_VERSION
        and entry.is_dir()
    )


def select_versions(policy: VersionPolicy, available: Iterable[int]) -> list[int]:
    """Return those of `available` that `policy` serves, ascending; possibly none."""
    ascending = sorted(available)
    if policy.kind == "specific":
        return [version for version in ascending if version in policy.versions]
    if policy.kind == "latest":
        return ascending[max(0, len(ascending) - policy.latest) :]
    return ascending


def served_versions(model_dir: Path, model_name: str, policy: VersionPolicy) -> list[int]:
    """Return the versions of the model in `model_dir` to load, ascending; at least one.

    Raises
    ------
    BridgeError
        ``NOT_FOUND`` when the directory cannot be listed, ``INVALID_ARG`` when no version of it
        falls under the policy.
    """
    available = available_versions(model_dir)
    selected = select_versions(policy, available)
    if not selected:
        found = ", ".join(map(str, available)) if available else "none"
        raise BridgeError(
            "at least one version must be available under the version policy of model "
            f"'{model_name}': put the model's file into a directory such as {model_dir / '1'} "
            f"(versions found: {found}; policy: {_policy_text(policy)})",
            ErrorCode.INVALID_ARG,
        )
    return selected


def _policy_text(policy: VersionPolicy) -> str:
    if policy.kind == "latest":
        return f"latest {policy.latest}"
    if policy.kind == "specific":
        return "specific " + (", ".join(map(str, policy.versions)) or "(an empty list)")
    return "all"
