"""Forwarding of request headers to models as parameters, by Triton's patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from gpubridge.dataplane import TraceSampling
from gpubridge.protocol.fields import json_parameters
from gpubridge.request import InferRequest

_TRANSPORT = re.compile(rb":.*|grpc-.*|te|content-type")
"""Header fields that gRPC libraries do not pass to a server's code."""


class ForwardedHeaders:
    """Selects headers whose whole name matches a pattern, in any case; an empty pattern selects none.

    ``secret``: names of headers, in lower case, that are never forwarded.

    Attributes: ``active``, whether any header may be forwarded; ``sampling``, by which Python sees every
    request then, instead of those that are traced.
    """

    def __init__(self, pattern: str = "", secret: Iterable[bytes] = ()) -> None:
        self.active = bool(pattern)
        self.sampling = TraceSampling()
        self.sampling.active = self.sampling.every = self.active
        self._secret = frozenset(secret)
        self._pattern = re.compile(pattern.encode(), re.IGNORECASE)

    def without(self, name: bytes) -> ForwardedHeaders:
        """Return the same, with one more header that is never forwarded."""
        return ForwardedHeaders(self._pattern.pattern.decode(), self._secret | {name})

    def of(self, fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
        """Return the selected headers of a request by name; the last of equal names counts."""
        return {
            _text(name): _text(value)
            for name, value in fields
            if self._pattern.fullmatch(name)
            and not _TRANSPORT.fullmatch(name)
            and name.lower() not in self._secret
        }


NO_HEADERS = ForwardedHeaders()


def add_parameters(request: InferRequest, given: Mapping[str, str]) -> None:
    """Add headers to a request's parameters, replacing parameters of the same name."""
    if given:
        text = request.context.parameters
        own = json.loads(bytes(text) if isinstance(text, memoryview) else text or "{}")
        request.context = request.context.changed(parameters=json_parameters({**own, **given}))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        # Decodes any bytes.
        return value.decode("latin-1")
