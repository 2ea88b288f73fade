"""Sizes of tensors as people write them."""

from __future__ import annotations

import re

__all__ = ["read_sizes", "size_text"]

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ELEMENT = 4


def read_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a list such as ``64KiB,1MiB``, in their order.

    Raises
    ------
    ValueError
        With what was expected, for the command line.
    """
    sizes = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)\s*([KMG]iB|)", word.strip())
        nbytes = int(found[1]) * _UNITS[found[2]] if found else 0
        if nbytes < _ELEMENT or nbytes % _ELEMENT:
            raise ValueError(
                f"expected sizes such as 64KiB,1MiB,1GiB, multiples of {_ELEMENT} bytes, got "
                f"{word.strip()!r}"
            )
        sizes.append(nbytes)
    return tuple(sizes)


def size_text(nbytes: int) -> str:
    """Return a size in the largest unit that it has one of."""
    unit = next(name for name, width in reversed(_UNITS.items()) if nbytes >= width)
    return f"{nbytes / _UNITS[unit]:g} {unit or 'B'}"
