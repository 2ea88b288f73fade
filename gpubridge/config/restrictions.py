"""Restricted endpoints that require a secret header: Triton's restricted APIs and protocols."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import invalid_flag

_TRITON = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository",
    "statistics", "trace", "logging",
)  # fmt: skip
_OF_OURS = {"settings": ("trace", "logging")}
"""Our names for several of Triton's groups."""
_GRPC_PREFIX = "triton-grpc-protocol-"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?")


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header that requests for a group of endpoints must have.

    ``refusal``: the error text for other requests.
    """

    header: str
    value: bytes = field(repr=False)
    refusal: str

    @property
    def name(self) -> bytes:
        """The header's name, in lower case."""
        return self.header.lower().encode()

    def admits(self, given: bytes | None) -> bool:
        """Return whether a request with this value of the header, or None, is admitted."""
        return given is not None and hmac.compare_digest(given, self.value)


Restrictions = Mapping[str, Restriction]
"""Restrictions by group: Triton's groups, ``metrics``, and those of OpenAI's API."""


def read_http_restrictions(texts: Iterable[str]) -> Restrictions:
    """Parse ``API[,API...]:KEY=VALUE``; raises INVALID_ARG.

    The group ``openai`` replaces ``inference`` and ``metadata`` for OpenAI's API, where its model list
    is the group ``openai-models``.
    """
    found = _read(texts, "--http-restricted-api", "API", "", (*_TRITON, "metrics", "openai"))
    for group, instead in (("openai-models", "metadata"), ("openai", "inference")):
        restriction = found.get("openai") or found.get(instead)
        if restriction is not None:
            found[group] = restriction
    return found


def read_grpc_restrictions(texts: Iterable[str]) -> Restrictions:
    """Parse ``PROTOCOL[,PROTOCOL...]:KEY=VALUE``; raises INVALID_ARG."""
    return _read(texts, "--grpc-restricted-protocol", "protocol", _GRPC_PREFIX, _TRITON)


def _read(
    texts: Iterable[str], flag: str, kind: str, prefix: str, known: tuple[str, ...]
) -> dict[str, Restriction]:
    """Parse the values of a flag. Errors never contain a header's value, which is secret."""
    found: dict[str, Restriction] = {}
    for text in texts:
        names, _, pair = text.partition(":")
        key, _, value = pair.partition("=")
        if not (names and key and value):
            raise invalid(f"{flag} option format is '<config name>:<setting>=<value>'")
        restriction = _restriction(flag, kind, prefix + key, os.fsencode(value))
        for name in names.split(","):
            if name not in known and name not in _OF_OURS:
                raise _unknown(kind, name, (*known, *_OF_OURS))
            for group in _OF_OURS.get(name, (name,)):
                if group in found:
                    raise invalid(
                        f"restricted {kind.lower()} '{group}' can not be specified in multiple config groups"
                    )
                found[group] = restriction
    return found


def _restriction(flag: str, kind: str, header: str, value: bytes) -> Restriction:
    if not _NAME.fullmatch(header):
        raise invalid_flag(flag, "the name of a header before '='", repr(header))
    if not _VALUE.fullmatch(value) or (kind == "protocol" and header.lower().endswith("-bin")):
        raise invalid(f"{flag}: no client can send a header {header!r} with that value")
    text = f"This {kind} is restricted, expecting header '{header}'"
    return Restriction(header, value, text)


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> BridgeError:
    return invalid(
        f"unknown restricted {kind.lower()} '{name}': expected one of {', '.join(known)}"
    )
