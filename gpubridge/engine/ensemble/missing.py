"""Why an ensemble cannot be loaded whose members are not there, in Triton's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["ModelRow", "explain_circle", "explain_missing"]


class ModelRow(Protocol):
    """What the repository says of a model's version."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def version(self) -> int:
        """0 where not even the versions are known."""

    @property
    def state(self) -> str:
        """READY and so on; empty where it was never loaded."""

    @property
    def reason(self) -> str:
        """Why it is in no better state."""


def explain_circle(name: str, needed: str) -> str:
    """Say that an ensemble needs a model that needs the ensemble."""
    return f"circular dependency between ensembles: {needed} -> ... -> {name} -> {needed}"


def explain_missing(name: str, model: str, version: int | None, index: Iterable[ModelRow]) -> str:
    """Say why an ensemble does not find a version of a member, or any, by the repository's index."""
    rows = [row for row in index if row.name == model and row.state]
    if not rows:
        return f"ensemble {name} contains models that are not available or ambiguous: {model}"
    if any(row.state == "READY" for row in rows):
        return f"ensemble '{name}' depends on '{model}' whose required version {version} is not loaded."
    if not rows[0].version:
        return (
            f"ensemble '{name}' depends on '{model}' which is not valid. Model '{model}' failed "
            f"with error: {rows[0].reason}"
        )
    reasons = "".join(
        f"version {row.version} is at {row.state} state: {row.reason};" for row in rows
    )
    return (
        f"ensemble '{name}' depends on '{model}' which has no loaded version. Model '{model}' "
        f"loading failed with error: {reasons}"
    )
