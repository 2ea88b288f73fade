"""Exceptions of models, and the checks of public functions' arguments that raise them.

Models may rely on a TypeError where Triton raises one, so None, floats for integers or a str for a
list of names are refused here, before any other code uses them.
"""

from __future__ import annotations

import enum
import json
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpubridge.errors import ErrorCode


class NamedEnum(enum.IntEnum):
    """Integers whose text is ``Class.NAME``; models write it into logs and messages."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class _ErrorCode(NamedEnum):
    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED


_ErrorCode.__module__ = "c_python_backend_utils"
_ErrorCode.__name__ = "__ErrorCode"
_ErrorCode.__qualname__ = "TritonError.__ErrorCode"


class TritonModelException(Exception):
    """A failure that pb_utils reports to a model; models may raise it themselves."""

    __module__ = "c_python_backend_utils"


class TritonError:
    """The error of one response.

    Parameters
    ----------
    message : str
        Reaches the client as it is.
    code : TritonError.__ErrorCode, optional
        One of the class attributes; decides the HTTP status or gRPC code.

    Raises
    ------
    TypeError
        If either is None or of another type.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_code", "_message")

    UNKNOWN: ClassVar[_ErrorCode] = _ErrorCode.UNKNOWN
    INTERNAL: ClassVar[_ErrorCode] = _ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[_ErrorCode] = _ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[_ErrorCode] = _ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[_ErrorCode] = _ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[_ErrorCode] = _ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[_ErrorCode] = _ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[_ErrorCode] = _ErrorCode.CANCELLED

    def __init__(self, message: str, code: _ErrorCode | ErrorCode = _ErrorCode.INTERNAL) -> None:
        if isinstance(message, bytes):
            message = message.decode()
        if not isinstance(message, str):
            raise TypeError(f"expected str for message, got {message!r}")
        if not isinstance(code, (_ErrorCode, ErrorCode)):
            raise TypeError(f"expected one of TritonError's codes for code, got {code!r}")
        self._message = message
        self._code = _ErrorCode(code)

    def code(self) -> _ErrorCode:
        """Give the error code."""
        return self._code

    def message(self) -> str:
        """Give the text."""
        return self._message


# Written inside the class, the name would be mangled.
setattr(TritonError, "__ErrorCode", _ErrorCode)


def wrong_type(what: str, expected: str, got: object) -> TypeError:
    """Make the TypeError for an argument of a wrong type."""
    return TypeError(f"expected {expected} for {what}, got {got!r} of type {type(got).__name__}")


def text(value: Any, what: str) -> str:
    """Return a str, or decode bytes as UTF-8; raise TypeError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    raise wrong_type(what, "str", value)


def sendable(value: Any, what: str) -> str:
    """Return text as :func:`text` does; raise TypeError for lone surrogates, which cannot be encoded."""
    taken = text(value, what)
    if not taken.isascii():
        try:
            taken.encode()
        except UnicodeEncodeError:
            raise wrong_type(what, "str without lone surrogates", taken) from None
    return taken


def integer(value: Any, what: str, least: int | None = None, most: int | None = None) -> int:
    """Return an int (bool and NumPy's integers included); raise TypeError for anything else."""
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
    """Return the truth value of a bool, a number or another object; TypeError for None and text."""
    if value is None or isinstance(value, (str, bytes)):
        raise wrong_type(what, "bool", value)
    return bool(value)


def sequence(value: Any, what: str) -> list[Any]:
    """Copy a list, tuple or another sequence (a deque, an array) to a new list.

    Raises TypeError for anything else: a str, a set or a generator is no sequence of elements.
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
