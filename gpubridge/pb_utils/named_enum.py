"""Enumerations that read like Triton's: ``str`` of a member is its name, in every Python."""

from __future__ import annotations

import enum

__all__ = ["NamedEnum"]


class NamedEnum(enum.IntEnum):
    """Integers whose text is ``Class.NAME``; models write it into logs and messages."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
