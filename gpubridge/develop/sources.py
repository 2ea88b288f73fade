"""Files of declared functions, for the processes that serve them; of a notebook, made of its cells."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from gpubridge.errors import BridgeError, invalid
from gpubridge.one_file.declare import Declaration, declaration_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple)


def declarations(targets: Sequence[Any]) -> list[Declaration]:
    """Return the declarations of functions and classes; raises INVALID_ARG for another object."""
    found = []
    for target in targets:
        declared = declaration_of(target)
        if declared is None:
            raise invalid(f"expected a path, or a function with @gpubridge.model, got {target!r}")
        if "<locals>" in target.__qualname__ or "." in target.__qualname__:
            raise invalid(
                f"model '{declared.name}' is defined inside of {target.__qualname__.rpartition('.')[0]}: "
                "expected a function or class of a module, which another process can import"
            )
        found.append(declared)
    return found


def file_of(declared: Declaration) -> str:
    """Return the Python file that declares a model; empty for a notebook's cell."""
    module = sys.modules.get(declared.target.__module__)
    path = getattr(module, "__file__", None) or ""
    return os.path.abspath(path) if path.endswith(".py") and os.path.isfile(path) else ""  # noqa: PTH100, PTH113


def notebook_module(declared: Sequence[Declaration]) -> str:
    """Return the source of a module with models of a notebook, and what their code refers to.

    Functions and classes of cells come with what they use in turn, imported modules and names are
    imported again, numbers and texts are written down.

    Raises BridgeError: INVALID_ARG for a name with another value, or without a source.
    """
    pieces: dict[str, str] = {}
    for each in declared:
        _add(each.target.__name__, each.target, each.name, pieces)
    # As numbers are written that have no literal.
    return "\n".join(["from math import inf, nan", *pieces.values()])


def _add(name: str, value: Any, user: str, pieces: dict[str, str]) -> None:
    """Add the line or the source that defines a name, after those that it needs."""
    if name in pieces:
        return
    module, title = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(value, types.ModuleType):
        pieces[name] = f"import {value.__name__} as {name}"
    elif module == "__main__" and isinstance(inspect.unwrap(value), (types.FunctionType, type)):
        # A function may use itself.
        pieces[name] = ""
        text, used = _cell_source(value, user)
        for other in used:
            if other in vars(sys.modules["__main__"]):
                _add(other, vars(sys.modules["__main__"])[other], value.__name__, pieces)
        del pieces[name]
        pieces[name] = text
    elif isinstance(value, _PLAIN):
        pieces[name] = f"{name} = {value!r}"
    elif module and title and _is_in(module, title, value):
        pieces[name] = f"from {module} import {title} as {name}"
    else:
        raise invalid(
            f"'{user}' uses '{name}', a {type(value).__name__} of the notebook, which the model's process "
            "does not have: make it in a class's __init__, or put the model into a file"
        )


def _is_in(module: str, title: str, value: Any) -> bool:
    """Return whether a module has a value by that name; it may not be imported under its own yet."""
    try:
        return getattr(importlib.import_module(module), title, None) is value
    except ImportError:
        return False


def _cell_source(value: Any, user: str) -> tuple[str, list[str]]:
    """Return the source of a function or class of a cell, and the names in it."""
    methods = vars(value).values() if isinstance(value, type) else [value]
    # Decorators may come from a library: their functions have the code of other files.
    own = map(inspect.unwrap, methods)
    files = {each.__code__.co_filename for each in own if isinstance(each, types.FunctionType)}
    for file in files:
        cell = "".join(linecache.getlines(file))
        for node in ast.parse(cell).body if cell else ():
            if getattr(node, "name", "") == value.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])  # type: ignore[attr-defined]
                lines = cell.splitlines()[first - 1 : node.end_lineno]
                names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
                return "\n".join(lines), names
    raise _no_source(value, user)


def _no_source(value: Any, user: str) -> BridgeError:
    return invalid(
        f"'{user}' needs the source of '{value.__name__}', which is not to be found: put it into a file"
    )
