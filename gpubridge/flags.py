"""Command-line flags, declared as fields of dataclasses.

Parsing, help and the tables of the documentation are generated from these declarations: a new flag is
a field, the code that reads it, and a test.

A class's ``flag_prefix`` is put before the names of its fields: ``idle_timeout`` with the prefix
``grpc-`` is ``--grpc-idle-timeout``. Its ``flag_group`` is the heading in the help of flags that name
no other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from gpubridge.errors import BridgeError, invalid, unsupported

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The declaration of a flag.

    - ``name``: with dashes.
    - ``default``: of the field; a class is called.
    - ``alias``: another name.
    - ``older``: older flags, each with a template of this flag's value.
    - ``least``: the lowest number that `check_flags` accepts.
    - ``read``: converts the value of argparse to the field's value.
    - ``options``: for ``add_argument``.
    - ``unserved``: set for flags of tritonserver that are not served.
    """

    name: str
    group: str
    text: str
    default: Any
    alias: str = ""
    older: Mapping[str, str]
    least: float | None = None
    read: Callable[[Any], Any] | None = None
    options: Mapping[str, Any]
    unserved: Unserved | None = None

    @property
    def key(self) -> str:
        """The name of the value in argparse's namespace."""
        return self.name[2:].replace("-", "_")

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words; empty if not restricted."""
        return tuple(self.options.get("choices", ()))


@dataclass(frozen=True, slots=True)
class Unserved:
    """A flag of tritonserver that is not served.

    - ``why``: the behaviour instead.
    - ``idle``: values without a request, which are accepted silently.
    - ``refused``: whether other values are errors; otherwise they are logged.
    """

    why: str
    idle: tuple[Any, ...]
    refused: bool

    def asks(self, given: tuple[Any, ...]) -> bool:
        """Return whether some of the given values request something."""
        return any(value not in self.idle for value in given)

    def refuses(self, given: tuple[Any, ...]) -> bool:
        """Return whether some of the given values are refused."""
        return self.refused and self.asks(given)


def flag(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    read: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Any:
    """Declare a field of a dataclass that a flag sets.

    - ``default``: of the field; a class is called. With ``MISSING``, a tuple or a class, the flag may
      be given several times.
    - ``text``: the flag's help.
    - ``options``: for ``add_argument``, except ``name``, ``alias``, ``older``, ``group`` and
      ``unserved`` of :class:`Flag`, with names without dashes.
    """
    declared = {name: options.pop(name, "") for name in ("name", "alias", "group")}
    declared |= {"older": options.pop("older", {}), "unserved": options.pop("unserved", None)}
    if default in (MISSING, ()) or isinstance(default, type):
        options = {"action": "append", "default": [], **options}
    elif "action" not in options:
        options = {"default": default, **_typed(default), **options}
    if "choices" in options and all(word.islower() for word in options["choices"]):
        # As Triton compares them.
        options["type"] = str.lower
    if default == () and read is None:
        read = tuple
    values = {"text": text, "default": default, "least": least, "read": read, "options": options}
    metadata = {"flag": {**declared, **values}}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def unserved(
    group: str,
    why: str,
    *idle: Any,
    of: Callable[[str], Any] = str,
    refused: bool = False,
    **options: Any,
) -> Any:
    """Declare a flag of tritonserver that is not served; see :class:`Unserved`. ``of`` converts it."""
    declared = Unserved(why, idle, refused)
    return flag((), why, group=group, unserved=declared, type=of, **options)


def documented(default: Any, text: str, **metadata: Any) -> Any:
    """Declare a field without a flag, with its line in the documentation."""
    return field(default=default, metadata={"text": text, **metadata})


def flags_of(kind: type) -> Any:
    """Declare a field whose flags are those of another dataclass."""
    return field(default_factory=kind, metadata={"flags": kind})


def declared_flags(kind: type) -> Iterator[Flag]:
    """Yield the flags of a dataclass and of its nested dataclasses."""
    for each in fields(kind):
        if "flags" in each.metadata:
            yield from declared_flags(each.metadata["flags"])
        elif "flag" in each.metadata:
            yield _flag(kind, each)


def add_flags(command: argparse.ArgumentParser, kind: type) -> None:
    """Add the flags of a dataclass to a command, under their headings."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    ignored = []
    for each in declared_flags(kind):
        if each.group not in groups:
            groups[each.group] = command.add_argument_group(each.group)
        add = groups[each.group].add_argument
        if each.unserved is not None:
            add(each.name, dest=each.key, help=argparse.SUPPRESS, **each.options)
            if not each.unserved.refused:
                ignored.append(each.name)
            continue
        names = (each.name, f"--{each.alias}") if each.alias else (each.name,)
        add(*names, dest=each.key, help=each.text.replace("%", "%%"), **each.options)
        for name, form in each.older.items():
            add(
                f"--{name}",
                dest=each.key,
                help=argparse.SUPPRESS,
                action="append",
                type=form.format,
            )
    if ignored:
        command.epilog = f"Accepted without effect: {' '.join(ignored)}"


def from_flags(kind: type[_Settings], options: argparse.Namespace, **others: Any) -> _Settings:
    """Return a dataclass with the values of its flags; ``others`` sets fields without a flag."""
    values = {}
    for each in fields(kind):  # type: ignore[arg-type]
        if "flags" in each.metadata and each.name not in others:
            values[each.name] = from_flags(each.metadata["flags"], options)
        elif "flag" in each.metadata:
            declared = _flag(kind, each)
            value = getattr(options, declared.key)
            values[each.name] = value if declared.read is None else declared.read(value)
    return kind(**values, **others)


def check_flags(settings: Any) -> None:
    """Refuse too low numbers and words that are not among the choices.

    Raises BridgeError: INVALID_ARG; UNSUPPORTED for refused flags of tritonserver.
    """
    for each in fields(settings):
        if "flag" not in each.metadata:
            continue
        declared, value = _flag(type(settings), each), getattr(settings, each.name)
        if declared.choices and isinstance(value, str) and value not in declared.choices:
            words = ", ".join(declared.choices)
            raise invalid_flag(declared.name, f"one of {words}", repr(value))
        if declared.least is not None and not value >= declared.least:
            number = "an integer" if type(each.default) is int else "a number"
            raise invalid_flag(declared.name, f"{number} of at least {declared.least}", str(value))
        if declared.unserved is not None and declared.unserved.refuses(value):
            raise unsupported(f"{declared.name}: {declared.unserved.why}")


def flags_without_effect(settings: Any) -> Iterator[str]:
    """Yield a sentence for each given flag without effect; not its value, which may be secret."""
    for each in fields(settings):
        if "flags" in each.metadata:
            yield from flags_without_effect(getattr(settings, each.name))
            continue
        declared = _flag(type(settings), each)
        if declared.unserved is not None and declared.unserved.asks(getattr(settings, each.name)):
            yield f"{declared.name} has no effect: {declared.unserved.why}"


def invalid_flag(name: str, expected: str, got: str) -> BridgeError:
    """Return the error for an invalid value of a flag."""
    return invalid(f"{name} expects {expected}, got {got}")


def boolean(text: str) -> bool:
    """Parse a boolean, for argparse."""
    value = text.lower()
    if value in ("true", "1", "on"):
        return True
    if value in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def _flag(kind: type, each: Field[Any]) -> Flag:
    values = dict(each.metadata["flag"])
    name = values["name"] or getattr(kind, "flag_prefix", "") + each.name.replace("_", "-")
    group = values["group"] or getattr(kind, "flag_group", "Server")
    return Flag(**{**values, "name": f"--{name}", "group": group})


def _typed(default: Any) -> dict[str, Any]:
    """Return the argparse options for values of the default's type."""
    if isinstance(default, bool):
        return {"type": boolean, "metavar": "BOOL"}
    if isinstance(default, (int, float)):
        return {"type": type(default), "metavar": "N" if isinstance(default, int) else "X"}
    return {}
