"""Two ids of one region: by the first it is mapped writable, by the second to be read only.

A process may know both: memory that was made for its model, and tensors beside it that somebody else
still looks at.
"""

from __future__ import annotations

__all__ = ["is_read_only", "made_id", "read_only_id"]

_READ_ONLY = 1 << 30
"""In the lower half of an id; regions are numbered from 1, and device arenas have the bit above."""


def read_only_id(region: int) -> int:
    """Return the id by which a region is mapped to be read only."""
    return region | _READ_ONLY


def made_id(region: int) -> int:
    """Return the id that the maker of a region gave it, of either of its ids."""
    return region & ~_READ_ONLY


def is_read_only(region: int) -> bool:
    """Whether an id is one by which a region is mapped to be read only."""
    return region & _READ_ONLY != 0
