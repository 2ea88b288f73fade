"""Exceptions and errors of models."""

from __future__ import annotations

import enum
from typing import ClassVar, NoReturn

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
    """A failure of the bridge that a model sees; models may raise it themselves."""

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


def refuse(what: str) -> NoReturn:
    """Raise TritonModelException for something this version cannot do."""
    raise TritonModelException(
        f"{what} is not supported by this version of gpubridge yet; see the compatibility table "
        "in its documentation"
    )


class SharedMemory:
    """Triton's shared memory pool, which gpubridge does not have: there is nothing to measure."""

    __module__ = "c_python_backend_utils"

    def free_memory(self) -> int:
        """Raise: there is no such pool."""
        refuse("shared_memory.free_memory()")
