"""Tables for the log, in the form that Triton's have."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["boxed"]


def boxed(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of one line each with lines around them; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    texts = [
        "|".join(["", *(f" {cell:<{width}} " for cell, width in zip(row, widths, strict=True)), ""])
        for row in rows
    ]
    return "\n".join([line, texts[0], line, *texts[1:], line])
