"""Where the links of an archive lead, found out before any of them exists."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["Escape", "borrows_interpreter", "check_link"]

_HOPS = 40
"""As many links in a row as the kernel follows."""

_INTERPRETER = re.compile(r"python[0-9.]*t?")


class Escape(Exception):
    """A link leads out of the tree; the text says how."""


def borrows_interpreter(path: str, target: str) -> bool:
    """Whether a link is that of a virtual environment to the interpreter that it was made with.

    The one link that may lead outside, as it is what a virtual environment is: ``bin/python3`` to
    an absolute path that ends in the name of an interpreter.
    """
    folder, _, name = path.rpartition("/")
    return (
        folder == "bin"
        and target.startswith("/")
        and _INTERPRETER.fullmatch(name) is not None
        and _INTERPRETER.fullmatch(target.rpartition("/")[2]) is not None
    )


def check_link(path: str, links: Mapping[str, str]) -> None:
    """Follow a link as the kernel would, with all the others in place.

    Parameters
    ----------
    path : str
        The link's path below the root of the tree, without ``.`` and ``..``.
    links : mapping of str to str
        The target of every link of the tree, by such a path; `path` among them.

    Raises
    ------
    Escape
        When it leads out of the tree at any step, or in a circle.
    """
    here: list[str] = []
    ahead = path.split("/")[::-1]
    hops = 0
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not here:
                raise Escape("leads out of the environment")
            here.pop()
            continue
        here.append(part)
        place = "/".join(here)
        target = links.get(place)
        if target is None:
            continue
        if target.startswith("/"):
            if borrows_interpreter(place, target) and not ahead:
                return
            raise Escape("leads to an absolute path")
        hops += 1
        if hops > _HOPS:
            raise Escape("leads in a circle")
        here.pop()
        ahead += target.split("/")[::-1]
