"""One line of what is found on a machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    subject : str
        What was looked at.
    works : bool
        Whether it can be used.
    detail : str
        What was seen; the reason, where it does not work.
    advice : str
        What to do about it; empty where there is nothing to do.
    needed : bool
        Whether nothing can be served without it.
    """

    subject: str
    works: bool
    detail: str
    advice: str = ""
    needed: bool = False
