"""Endpoints that only who knows a header's value may use: Triton's restricted APIs and protocols."""

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
"""Names of ours for several groups of Triton's."""
_GRPC_PREFIX = "triton-grpc-protocol-"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?")


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header that the requests of a group of endpoints must have.

    ``refusal``: the text for those that have not.
    """

    header: str
    value: bytes = field(repr=False)
    refusal: str

    @property
    def name(self) -> bytes:
        """The header's name, in lower case."""
        return self.header.lower().encode()

    def admits(self, given: bytes | None) -> bool:
        """Return whether a request may pass that has the header with such a value, or None."""
        return given is not None and hmac.compare_digest(given, self.value)


Restrictions = Mapping[str, Restriction]
"""By the names of the groups, which are Triton's, and ``metrics``."""


def read_http_restrictions(texts: Iterable[str]) -> Restrictions:
    """Return the restrictions that ``API[,API...]:KEY=VALUE`` name, or raise INVALID_ARG."""
    return _read(texts, "--http-restricted-api", "API", "", (*_TRITON, "metrics"))


def read_grpc_restrictions(texts: Iterable[str]) -> Restrictions:
    """Return the restrictions that ``PROTOCOL[,PROTOCOL...]:KEY=VALUE`` name, or raise INVALID_ARG."""
    return _read(texts, "--grpc-restricted-protocol", "protocol", _GRPC_PREFIX, _TRITON)


def _read(
    texts: Iterable[str], flag: str, kind: str, prefix: str, known: tuple[str, ...]
) -> Restrictions:
    """Read what a flag was given. No error has a value in it: that is a secret."""
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
