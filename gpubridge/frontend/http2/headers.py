"""Header lists: what a valid request's says, and what makes one malformed (RFC 9113, section 8)."""

from __future__ import annotations

import re
from typing import TypeAlias

__all__ = ["Fields", "MalformedHeaders", "RequestHeaders", "check_trailers"]

Fields: TypeAlias = tuple[tuple[bytes, bytes], ...]

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
# No NUL, CR, LF; no blank at either end.
_VALUE = re.compile(rb"(?:[^\0\r\n \t](?:[^\0\r\n]*[^\0\r\n \t])?)?", re.DOTALL)
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_A_CONNECTION = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
# More digits than any length has; int() of very many is slow.
_LENGTH_DIGITS = 19


class MalformedHeaders(Exception):
    """A header list breaks a rule; the text says which."""


class RequestHeaders:
    """The headers of a request, valid.

    Requests repeat: for a header block with the same meaning as one before, the same object comes
    again. `note` is for the handler, to keep there what it made of the headers the first time.

    Parameters
    ----------
    fields : tuple of (bytes, bytes)
        All fields in their order, pseudo-header fields included.

    Raises
    ------
    MalformedHeaders
        The list breaks a rule.
    """

    __slots__ = ("authority", "content_length", "fields", "method", "note", "path", "scheme")

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        pseudo: dict[bytes, bytes] = {}
        for name, value in fields:
            if not name.startswith(b":"):
                break
            if name not in _PSEUDO or name in pseudo:
                raise MalformedHeaders(
                    "expected :method, :scheme, :path and :authority once each, got "
                    f"{_shown(name)} {'again' if name in pseudo else ''}"
                )
            _check_value(name, value)
            pseudo[name] = value
        self.method = pseudo.get(b":method", b"")
        self.scheme = pseudo.get(b":scheme", b"")
        self.path = pseudo.get(b":path", b"")
        self.authority = pseudo.get(b":authority", b"")
        self.note: object = None
        self._check_pseudo(pseudo)
        self.content_length = _check_regular(fields[len(pseudo) :])

    def _check_pseudo(self, pseudo: dict[bytes, bytes]) -> None:
        """Check which pseudo-header fields there are."""
        if self.method == b"CONNECT":
            if b":scheme" in pseudo or b":path" in pseudo or not self.authority:
                raise MalformedHeaders("CONNECT: expected :authority, neither :scheme nor :path")
        elif not (self.method and self.scheme and self.path):
            got = ", ".join(_shown(name) for name in pseudo) or "none"
            raise MalformedHeaders(f"expected :method, :scheme and :path, not empty, got {got}")


def check_trailers(fields: Fields) -> None:
    """Check the fields that end a request.

    Raises
    ------
    MalformedHeaders
        The list breaks a rule; a pseudo-header field is one.
    """
    _check_regular(fields)


def _check_regular(fields: Fields) -> int | None:
    """Check fields that are no pseudo-header fields; return the content-length if there is one."""
    length: bytes | None = None
    for name, value in fields:
        if not _NAME.fullmatch(name):
            raise MalformedHeaders(
                "expected a name of lower-case token characters, pseudo-header fields before all "
                f"others, got {_shown(name)}"
            )
        _check_value(name, value)
        if name in _OF_A_CONNECTION:
            raise MalformedHeaders(f"expected no field of a connection, got {_shown(name)}")
        if name == b"te" and value.lower() != b"trailers":
            raise MalformedHeaders(f"te: expected 'trailers', got {_shown(value)}")
        if name == b"content-length":
            if length not in (None, value):
                raise MalformedHeaders("expected one content-length, got two that differ")
            length = value
    if length is None:
        return None
    if not (length.isdigit() and len(length) <= _LENGTH_DIGITS):
        raise MalformedHeaders(f"content-length: expected a number, got {_shown(length)}")
    return int(length)


def _check_value(name: bytes, value: bytes) -> None:
    if not _VALUE.fullmatch(value):
        raise MalformedHeaders(
            f"{_shown(name)}: expected no NUL, CR, LF and no blank at its ends, got {_shown(value)}"
        )


def _shown(text: bytes) -> str:
    """Show the beginning of what a peer sent."""
    return repr(text[:64])[1:]
