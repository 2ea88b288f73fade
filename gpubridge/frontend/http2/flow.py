"""Flow control's arithmetic (RFC 9113, section 5.2 and 6.9)."""

from __future__ import annotations

__all__ = ["DEFAULT_WINDOW", "MAX_WINDOW", "credit_due"]

MAX_WINDOW = 0x7FFFFFFF
DEFAULT_WINDOW = 65_535


def credit_due(full: int, window: int, held: int = 0) -> int:
    """Return by how much a receive window is to be widened now; 0 for not yet.

    Parameters
    ----------
    full : int
        What the window is when nothing has come.
    window : int
        What the peer may still send.
    held : int
        Bytes that came and are not consumed yet.

    Returns
    -------
    int
        0 until half of the window is to be given back, so that small messages cost no
        WINDOW_UPDATE each.
    """
    due = full - window - held
    return due if 2 * due >= full else 0
