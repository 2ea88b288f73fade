"""The one error tree of gpubridge: a protocol-neutral code and a message.

Endpoints map codes to their own status (``gpubridge.protocol.status``); only type name, text and code
ever go to another process.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any, Union


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
        # As in Triton, for models that log `error.code()`.
        return f"__ErrorCode.{self.name}"


_LONGEST_CHARACTER = 4
_LONGEST_NAME = 128
_MOST_NAMES = 16
"""Names that a message lists."""
_LONGEST_TOLD = 1 << 16
"""Longer messages of models are a `LongError`; others have text of the client in them, which knows it."""
_OPENING = b'{"error":"'
Pieces = Sequence[Union[bytes, memoryview]]


class BridgeError(Exception):
    """A failure that is reported to its caller.

    ``message``: what was expected, what was found, where, and what to do.

    - ``whose``: of a failed request, the model's statistics and the request's id.
    - ``fault``: True where the model or the server is to blame, and not the request.
    """

    whose: tuple[Any, str] | None = None
    fault = False

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    def copy(self) -> BridgeError:
        """Return a copy without a traceback, whose frames would keep their variables alive."""
        return self._like(BridgeError(self.message, self.code))

    def opening(self, length: int) -> str:
        """Return the first ``length`` characters of the message."""
        return self.message[:length]

    @property
    def told(self) -> str:
        """The message for a client: of one with a client's own long text, the begin and the end."""
        more = len(self.message) - _LONGEST_TOLD
        if more <= 0:
            return self.message
        half = _LONGEST_TOLD // 2
        return f"{self.message[:half]}... ({more} more characters) ...{self.message[-half:]}"

    def prefixed(self, prefix: str) -> BridgeError:
        """Return a copy with a prefix before its message."""
        return self._like(BridgeError(prefix + self.message, self.code))

    def _like(self, other: BridgeError) -> BridgeError:
        other.whose, other.fault = self.whose, self.fault
        return other


class LongError(BridgeError):
    """A failure with a message of a model that takes long to decode.

    - ``text``: the message in UTF-8, in pieces, decoded only when ``message`` is read.
    - ``body``: the JSON object of the HTTP response, in pieces.
    """

    def __init__(self, text: Pieces, body: Pieces, code: ErrorCode) -> None:
        Exception.__init__(self)
        self.text = text
        self.body = body
        self.code = code

    @property
    def message(self) -> str:  # type: ignore[override]
        """The decoded text."""
        return b"".join(self.text).decode()

    @property
    def told(self) -> str:
        """The decoded text, whole."""
        return self.message

    def copy(self) -> BridgeError:
        """Return a copy without a traceback."""
        return self._like(LongError(self.text, self.body, self.code))

    def opening(self, length: int) -> str:
        """Return the first ``length`` characters of the message; only those are decoded."""
        opening = b"".join(piece[: _LONGEST_CHARACTER * length] for piece in self.text)
        return opening.decode(errors="ignore")[:length]

    def prefixed(self, prefix: str) -> BridgeError:
        """Return a copy with a prefix before its message."""
        text = json.dumps(prefix, ensure_ascii=False)[:-1].encode(errors="replace")
        first, *others = self.body
        body = b'{"error":' + text, memoryview(first)[len(_OPENING) :], *others
        return LongError((prefix.encode(errors="replace"), *self.text), body, self.code)


def invalid(message: str) -> BridgeError:
    """Return an error with the code INVALID_ARG."""
    return BridgeError(message, ErrorCode.INVALID_ARG)


def listed(names: Sequence[str]) -> str:
    """Return names in quotes for a message; of many, or of long ones, the beginning."""
    shown = [f"'{name[:_LONGEST_NAME]}'" for name in names[:_MOST_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def not_found(message: str) -> BridgeError:
    """Return an error with the code NOT_FOUND."""
    return BridgeError(message, ErrorCode.NOT_FOUND)


def unavailable(message: str) -> BridgeError:
    """Return an error with the code UNAVAILABLE."""
    return BridgeError(message, ErrorCode.UNAVAILABLE)


def unsupported(message: str) -> BridgeError:
    """Return an error with the code UNSUPPORTED."""
    return BridgeError(message, ErrorCode.UNSUPPORTED)


class QueueFull(BridgeError):
    """A request refused because its model's queue is full."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)

    def copy(self) -> QueueFull:
        """Return a copy without a traceback."""
        return QueueFull(self.message)


class ArenaFull(BridgeError):
    """A request refused because the memory of all requests is in use; the message has the numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)

    def copy(self) -> ArenaFull:
        """Return a copy without a traceback."""
        return ArenaFull(self.message)


class NoMemory(BridgeError):
    """A request that the system has no memory for; others are not concerned."""

    def __init__(
        self,
        message: str = "the server has no memory for the request: send fewer or "
        "smaller requests at once",
    ) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)

    def copy(self) -> NoMemory:
        """Return a copy without a traceback."""
        return NoMemory(self.message)


class InternalError(BridgeError):
    """A bug of gpubridge itself: an impossible state."""

    fault = True


class StubDied(BridgeError):
    """The process that ran the model has ended; the message says how."""

    fault = True

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)
