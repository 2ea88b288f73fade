"""Lanes of the gate that need not run again: what they depend on is what it was when they last passed."""

from __future__ import annotations

import json
from pathlib import Path

from devtools.fingerprints import NATIVE_SOURCES, digest_of_files

__all__ = ["LANES", "RECORD", "has_passed", "note_pass"]

RECORD = Path(".ci", "passed.json")
"""The fingerprint of each lane when it last passed: written by ``./dev``, committed with the change."""
_COMMON = (*NATIVE_SOURCES, "gpubridge/schema", "dev", "devtools", ".ci/run")
LANES = {
    "sanitize": (*_COMMON, "tests/fuzz/native"),
    "building": (*_COMMON, "tests/building", "tests/first_answers.py", "docs/tutorials"),
}
"""What each lane depends on. A lane whose fingerprint is not the recorded one runs: nothing else is trusted."""


def has_passed(root: Path, lane: str) -> bool:
    """Return whether a lane passed with what is in the tree now."""
    return _recorded(root).get(lane) == digest_of_files(root, LANES[lane])


def note_pass(root: Path, lane: str) -> None:
    """Record that a lane has passed."""
    passed = {**_recorded(root), lane: digest_of_files(root, LANES[lane])}
    (root / RECORD).write_text(json.dumps(passed, indent=1, sort_keys=True) + "\n")


def _recorded(root: Path) -> dict[str, str]:
    """Return what is recorded; of a record that cannot be read, nothing."""
    try:
        found = json.loads((root / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
