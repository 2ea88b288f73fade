"""The one error tree of gpubridge: a protocol-neutral code and a message.

Doors map codes to their own status (``gpubridge.protocol.status``); only type name, text and code
ever cross a process wall.
"""

from __future__ import annotations

import enum


class ErrorCode(enum.IntEnum):
    """Triton's error codes, with the numbers of ``TRITONSERVER_Error_Code``."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __str__(self) -> str:
        # What models that log `error.code()` see at Triton.
        return f"__ErrorCode.{self.name}"


class BridgeError(Exception):
    """A failure that is reported to exactly the caller it belongs to.

    Parameters
    ----------
    message : str
        What was expected, what came, where, and what to do.
    code : ErrorCode, optional
        The protocol-neutral code; ``INTERNAL`` unless told otherwise.
    """

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def invalid(message: str) -> BridgeError:
    """Return an error with the code INVALID_ARG."""
    return BridgeError(message, ErrorCode.INVALID_ARG)


def not_found(message: str) -> BridgeError:
    """Return an error with the code NOT_FOUND."""
    return BridgeError(message, ErrorCode.NOT_FOUND)


def unavailable(message: str) -> BridgeError:
    """Return an error with the code UNAVAILABLE."""
    return BridgeError(message, ErrorCode.UNAVAILABLE)


def unsupported(message: str) -> BridgeError:
    """Return an error with the code UNSUPPORTED."""
    return BridgeError(message, ErrorCode.UNSUPPORTED)


class InternalError(BridgeError):
    """A bug of gpubridge itself: an impossible state was met."""


class StubDied(BridgeError):
    """The process that ran the model is gone; the message says how."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)
