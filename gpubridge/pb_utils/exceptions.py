"""What a model raises and returns when it fails."""

from __future__ import annotations

from typing import ClassVar

from gpubridge.errors import ErrorCode

__all__ = ["TritonError", "TritonModelException"]


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

    UNKNOWN: ClassVar[ErrorCode] = ErrorCode.UNKNOWN
    INTERNAL: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    NOT_FOUND: ClassVar[ErrorCode] = ErrorCode.NOT_FOUND
    INVALID_ARG: ClassVar[ErrorCode] = ErrorCode.INVALID_ARG
    UNAVAILABLE: ClassVar[ErrorCode] = ErrorCode.UNAVAILABLE
    UNSUPPORTED: ClassVar[ErrorCode] = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS: ClassVar[ErrorCode] = ErrorCode.ALREADY_EXISTS
    CANCELLED: ClassVar[ErrorCode] = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        if isinstance(message, bytes):
            message = message.decode()
        if not isinstance(message, str):
            raise TypeError(f"expected str for message, got {message!r}")
        if not isinstance(code, ErrorCode):
            raise TypeError(f"expected one of TritonError's codes for code, got {code!r}")
        self._message = message
        self._code = code

    def code(self) -> ErrorCode:
        """Give the error code."""
        return self._code

    def message(self) -> str:
        """Give the text."""
        return self._message


# Written inside the class, the name would be mangled.
setattr(TritonError, "__ErrorCode", ErrorCode)
