"""Command-line flags that are declared where their values are: as fields of a dataclass.

A class's ``flag_prefix`` stands before the names of its fields: ``idle_timeout`` of one with the
prefix ``grpc-`` is ``--grpc-idle-timeout``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from gpubridge.errors import BridgeError, invalid

_Settings = TypeVar("_Settings")


def flag(
    default: Any,
    text: str,
    *,
    name: str = "",
    alias: str = "",
    least: float | None = None,
    read: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Any:
    """Declare a field of a dataclass that a flag sets.

    - ``default``: the field's; a class is called for it. Without one (``MISSING``), or with a tuple
      or dict, the flag may be given several times.
    - ``text``: the flag's help.
    - ``name``, ``alias``: the flag, without dashes, where it is not the field's name, and another.
    - ``least``: the lowest number that `check_flags` lets pass.
    - ``read``: makes the field's value of what argparse has.
    - ``options``: for ``add_argument``.
    """
    if default in (MISSING, ()) or isinstance(default, type):
        options = {"action": "append", "default": [], **options}
    elif default is not None:
        of_type = boolean if isinstance(default, bool) else type(default)
        options = {"type": of_type, "default": default, **options}
        if isinstance(default, bool):
            options["metavar"] = "BOOL"
    if default == () and read is None:
        read = tuple
    options["help"] = text
    names = name, alias
    metadata = {"flag": names, "least": least, "read": read, "options": options}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def add_flags(command: argparse.ArgumentParser, kind: type) -> None:
    """Add the flags of a dataclass to a command."""
    for each, name in _flags(kind):
        alias = each.metadata["flag"][1]
        names = (name, f"--{alias}") if alias else (name,)
        command.add_argument(*names, **each.metadata["options"])


def from_flags(kind: type[_Settings], options: argparse.Namespace, **others: Any) -> _Settings:
    """Make a dataclass of what its flags say; ``others`` are the values of fields without one."""
    values = {}
    for each, name in _flags(kind):
        value = getattr(options, name[2:].replace("-", "_"))
        read = each.metadata["read"]
        values[each.name] = value if read is None else read(value)
    return kind(**values, **others)


def check_flags(settings: Any) -> None:
    """Refuse numbers that are too low, and words that are none of the choices, with INVALID_ARG."""
    for each, name in _flags(type(settings)):
        value, least = getattr(settings, each.name), each.metadata["least"]
        choices = each.metadata["options"].get("choices")
        if choices and value not in choices:
            raise invalid_flag(name, f"one of {', '.join(choices)}", repr(value))
        if least is not None and not value >= least:
            number = "an integer" if type(each.default) is int else "a number"
            raise invalid_flag(name, f"{number} of at least {least}", str(value))


def invalid_flag(name: str, expected: str, got: str) -> BridgeError:
    """Return the error for a flag with a value that it cannot have."""
    return invalid(f"{name} expects {expected}, got {got}")


def _flags(kind: type) -> Iterator[tuple[Field[Any], str]]:
    """Give the fields that have a flag, and its name."""
    prefix = getattr(kind, "flag_prefix", "")
    for each in fields(kind):
        if "flag" in each.metadata:
            name = each.metadata["flag"][0] or prefix + each.name.replace("_", "-")
            yield each, f"--{name}"


def boolean(text: str) -> bool:
    """Read a switch, for argparse."""
    value = text.lower()
    if value in ("true", "1", "on"):
        return True
    if value in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
