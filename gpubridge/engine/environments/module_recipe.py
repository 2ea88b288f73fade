"""The steps that build one module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Inputs of a build beside the sources.

    - ``name``: the file's name.
    - ``compiler``: its command.
    - ``include``: the folder of the interpreter's ``Python.h``.
    - ``stable``: for the stable ABI of CPython 3.12.
    """

    name: str
    compiler: Sequence[str]
    include: str
    stable: bool
