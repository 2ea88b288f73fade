"""Checks of public functions' arguments: text, numbers and lists.

Models may rely on a TypeError where Triton raises one, so None, floats for integers or a str for a
list of names are refused here, before anything else looks at them.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpubridge.pb_utils.exceptions import TritonModelException


def wrong_type(what: str, expected: str, got: object) -> TypeError:
    """Make the TypeError for an argument of a type that is not taken."""
    return TypeError(f"expected {expected} for {what}, got {got!r} of type {type(got).__name__}")


def text(value: Any, what: str) -> str:
    """Take a str, or bytes that are UTF-8; TypeError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise wrong_type(what, "str", value)


def sendable(value: Any, what: str) -> str:
    """Take text as :func:`text` does, if it can be sent: a lone surrogate cannot be encoded."""
    taken = text(value, what)
    if not taken.isascii():
        try:
            taken.encode()
        except UnicodeEncodeError:
            raise wrong_type(what, "str without lone surrogates", taken) from None
    return taken


def integer(value: Any, what: str, least: int | None = None, most: int | None = None) -> int:
    """Take an int (bool included), or what stands for one as NumPy's do; TypeError for another."""
    number = _whole(value)
    fits = number is not None and not (
        (least is not None and number < least) or (most is not None and number > most)
    )
    if number is None or not fits:
        expected = "int" if least is None else f"int of {least} or more"
        raise wrong_type(what, expected if most is None else f"int of {least} to {most}", value)
    return number


def _whole(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def truth(value: Any, what: str) -> bool:
    """Take a bool, or what has a truth value as numbers have; TypeError for None and text."""
    if value is None or isinstance(value, (str, bytes)):
        raise wrong_type(what, "bool", value)
    return bool(value)


def sequence(value: Any, what: str) -> list[Any]:
    """Take a list, tuple or another sequence (a deque, an array) as a new list.

    Raises TypeError for anything else; a str, a set or a generator is not a list of things.
    """
    if not isinstance(value, (list, tuple)) and (
        isinstance(value, (str, bytes, bytearray))
        or not isinstance(value, (Sequence, np.ndarray))
        or (isinstance(value, np.ndarray) and value.ndim != 1)
    ):
        raise wrong_type(what, "list", value)
    return list(value)


def json_parameters(parameters: Any) -> str:
    """Write request or response parameters as the JSON text that ``parameters()`` returns.

    Raises TritonModelException if `parameters` is neither None nor a dict of str to bool, int or
    str.
    """
    if parameters is None:
        return "{}"
    if not isinstance(parameters, dict):
        # The mangled C++ name is what Triton's text has here, and what models may match on.
        raise TritonModelException(f"Expect N8pybind114dictE, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return json.dumps(parameters)
