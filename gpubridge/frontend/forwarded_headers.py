"""Forwarding of request headers to the model, as parameters chosen by Triton's patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from gpubridge.config import Restrictions
from gpubridge.protocol.fields import json_parameters
from gpubridge.request import InferRequest

_TRANSPORT = re.compile(rb":.*|grpc-.*|te|content-type")
"""Fields of gRPC that its own libraries do not tell a server's code."""


class ForwardedHeaders:
    """Headers whose names a pattern matches as a whole, in any case; those of an empty one are none.

    ``restrictions``: their headers are secrets, which no model gets.

    Attribute ``active``: whether there may be such headers, so that the plane hands over every request.
    """

    def __init__(self, pattern: str = "", restrictions: Restrictions | None = None) -> None:
        self.active = bool(pattern)
        self._secret = {restriction.name for restriction in (restrictions or {}).values()}
        self._pattern = re.compile(pattern.encode(), re.IGNORECASE)

    def of(self, fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return those of a request, named as they came; of equal names the last one counts."""
        return {
            _text(name): _text(value)
            for name, value in fields
            if self._pattern.fullmatch(name)
            and not _TRANSPORT.fullmatch(name)
            and name.lower() not in self._secret
        }


NO_HEADERS = ForwardedHeaders()


def add_parameters(request: InferRequest, given: Mapping[str, str]) -> None:
    """Add headers to a request's parameters; they win over those of the same name."""
    if given:
        text = request.context.parameters
        own = json.loads(bytes(text) if isinstance(text, memoryview) else text or "{}")
        request.context = request.context.changed(parameters=json_parameters({**own, **given}))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        # Every byte is a letter there.
        return value.decode("latin-1")
