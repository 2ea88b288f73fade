"""Origins of web pages that may ask the server, in the form that browsers send."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpubridge.flags import invalid_flag

ANY_ORIGIN = "*"
_FLAG = "--http-allowed-origins"
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)
_USUAL_PORTS = {"http": "80", "https": "443"}


def read_origins(texts: Iterable[str]) -> tuple[str, ...]:
    """Parse ``SCHEME://HOST[:PORT]`` and ``*``, separated by commas; raises INVALID_ARG."""
    found: list[str] = []
    for item in ",".join(texts).split(","):
        text = item.strip().lower()
        match = _ORIGIN.fullmatch(text)
        if match is not None:
            port = match["port"]
            # Browsers leave out a usual port.
            shown = port and port != _USUAL_PORTS.get(match["scheme"])
            found.append(f"{match['scheme']}://{match['host']}{f':{port}' if shown else ''}")
        elif text == ANY_ORIGIN:
            found.append(ANY_ORIGIN)
        elif text:
            raise invalid_flag(_FLAG, "SCHEME://HOST[:PORT] or *", repr(item))
    return tuple(found)


def host_names(origins: Iterable[str]) -> list[str]:
    """Return the hosts of origins, without ports."""
    matches = map(_ORIGIN.fullmatch, origins)
    return [match["host"] for match in matches if match is not None]
