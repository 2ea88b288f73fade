"""What the head of a request says of its message."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httptools

from gpubridge.frontend.http.message import RequestHead, accepted_coding

__all__ = ["MessageHead", "read_head"]

_DIGITS = re.compile(rb"[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class MessageHead:
    """A request's head, read.

    Attributes
    ----------
    close : bool
        Whether the connection ends with the message.
    version : str
        Of HTTP.
    coding : str or None
        The content coding that the client would like for the answer.
    length : int or None
        Bytes of the body by its Content-Length; None for a number that is none, or too large.
    chunked : bool
        Whether the body comes in chunks instead.
    collected : bool
        Whether the body must be put together before it is what the handler wants.
    expects : bool
        Whether the client waits to be told to send the body.
    upgrade : bool
        Whether the client would like another protocol.
    """

    request: RequestHead
    close: bool
    version: str
    coding: str | None
    length: int | None
    chunked: bool
    collected: bool
    expects: bool
    upgrade: bool


def read_head(parser: httptools.HttpRequestParser, request: RequestHead) -> MessageHead:
    """Return what a head says; ``parser`` has just parsed it into ``request``."""
    headers = request.headers
    accepts = headers.get(b"accept-encoding")
    length = headers.get(b"content-length", b"0")
    chunked = b"transfer-encoding" in headers
    coded = headers.get(b"content-encoding", b"identity") != b"identity"
    return MessageHead(
        request,
        close=not parser.should_keep_alive() or request.method == b"CONNECT",
        version=parser.get_http_version(),
        coding=accepted_coding(accepts) if accepts else None,
        length=int(length) if _DIGITS.fullmatch(length) else None,
        chunked=chunked,
        collected=chunked or coded,
        expects=headers.get(b"expect", b"").lower() == b"100-continue"
        and (chunked or length != b"0"),
        upgrade=parser.should_upgrade(),
    )
