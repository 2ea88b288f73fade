"""Restricted endpoints that require a secret header: Triton's restricted APIs and protocols."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpubridge.config.files import read_regular
from gpubridge.errors import BridgeError, invalid
from gpubridge.flags import invalid_flag

if TYPE_CHECKING:
    from gpubridge.dataplane import RequiredField

_logger = logging.getLogger(__name__)

_TRITON = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository",
    "statistics", "trace", "logging",
)  # fmt: skip
_OF_OURS = {"settings": ("trace", "logging")}
"""Our names for several of Triton's groups."""
_ALL = "all"
_HTTP_FLAG, _GRPC_FLAG = "--http-restricted-api", "--grpc-restricted-protocol"
_FILE, _VARIABLE = "@", "@env:"
_FILE_BYTES = 1 << 16
_GRPC_PREFIX = "triton-grpc-protocol-"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?")


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header that requests for a group of endpoints must have.

    - ``required``: has the header's values, of which each admits a request. The plane compares with it, too.
    - ``source``: where the values are from: a value, ``@FILE`` or ``@env:NAME``.
    - ``refusal``: the error text for other requests.
    """

    header: str
    required: RequiredField = field(repr=False)
    source: str = field(repr=False)
    flag: str
    refusal: str

    @property
    def name(self) -> bytes:
        """The header's name, in lower case."""
        return self.header.lower().encode()

    def admits(self, given: bytes | None) -> bool:
        """Return whether a request with this value of the header, or None, is admitted."""
        return given is not None and self.required.admits(given)

    def reload(self) -> None:
        """Take the values that their file has now; where that fails, log why, and change nothing."""
        try:
            values = _values(self.flag, self.header, self.source)
        except BridgeError as error:
            _logger.error("SIGHUP: the keys stay as they are: %s", error)  # noqa: TRY400
        else:
            self.required.set_values(values)


Restrictions = Mapping[str, Restriction]
"""Restrictions by group: Triton's groups, ``metrics``, and those of OpenAI's API."""


def read_http_restrictions(texts: Iterable[str]) -> Restrictions:
    """Parse ``API[,API...]:KEY=VALUE``; raises INVALID_ARG.

    The group ``openai`` replaces ``inference`` and ``metadata`` for OpenAI's API, where its model list
    is the group ``openai-models``. Metrics tell what statistics tell, and the models and versions that
    metadata tells: without a header of their own they need that of statistics, or else of metadata.
    """
    found = _read(texts, _HTTP_FLAG, "API", "", (*_TRITON, "metrics", "openai"))
    openai = found.get("openai")
    for group, restriction in (
        ("openai-models", openai or found.get("metadata")),
        ("openai", openai or found.get("inference")),
        ("metrics", found.get("metrics") or found.get("statistics") or found.get("metadata")),
    ):
        if restriction is not None:
            found[group] = restriction
    return found


def read_grpc_restrictions(texts: Iterable[str]) -> Restrictions:
    """Parse ``PROTOCOL[,PROTOCOL...]:KEY=VALUE``; raises INVALID_ARG."""
    return _read(texts, _GRPC_FLAG, "protocol", _GRPC_PREFIX, _TRITON)


def header_names(restrictions: Restrictions) -> set[bytes]:
    """Return the names of the headers, whose values are secrets, in lower case."""
    return {restriction.name for restriction in restrictions.values()}


def open_groups(http: Restrictions | None, grpc: Restrictions | None) -> Iterator[str]:
    """Yield a log line for each endpoint that has open groups while others, here or there, are closed.

    ``http``, ``grpc``: None where the endpoint is not served.
    """
    for flag, found, known in (
        (_HTTP_FLAG, http, (*_TRITON, "metrics", "openai")),
        (_GRPC_FLAG, grpc, _TRITON),
    ):
        groups = [] if found is None else [group for group in known if group not in found]
        if groups and (http or grpc):
            yield f"{flag}: every client may still use {', '.join(groups)}; the group 'all' closes all"


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
        restriction = _restriction(flag, kind, prefix + key, value)
        several = {**_OF_OURS, _ALL: known}
        for name in names.split(","):
            if name not in known and name not in several:
                raise _unknown(kind, name, (*known, *several))
            for group in several.get(name, (name,)):
                if group in found:
                    raise invalid(
                        f"restricted {kind.lower()} '{group}' can not be specified in multiple config groups"
                    )
                found[group] = restriction
    return found


def _restriction(flag: str, kind: str, header: str, source: str) -> Restriction:
    if not _NAME.fullmatch(header):
        raise invalid_flag(flag, "the name of a header before '='", repr(header))
    values = _values(flag, header, source)
    text = f"This {kind} is restricted, expecting header '{header}'"
    # The configuration is read without the compiled module, too: by the doctor, and to say that it is missing.
    from gpubridge.dataplane import RequiredField  # noqa: PLC0415

    required = RequiredField(header.lower().encode(), values)
    return Restriction(header, required, source, flag, text)


def _values(flag: str, header: str, source: str) -> list[bytes]:
    """Return the values that a source has: the lines of a file, or of a variable, or itself."""
    if source.startswith(_VARIABLE):
        name = source[len(_VARIABLE) :]
        text = os.environb.get(name.encode())
        if text is None:
            raise invalid(f"{flag}: the environment has no variable {name!r}")
        values = text.split(b"\n")
    elif source.startswith(_FILE):
        path = Path(source[len(_FILE) :])
        try:
            values = read_regular(path, _FILE_BYTES).split(b"\n")
        except OSError as error:
            raise invalid(f"{flag}: cannot read {path}: {error.strerror}") from error
    else:
        values = [os.fsencode(source)]
    if source.startswith(_FILE):
        values = [value.strip() for value in values if value.strip()]
        if not values:
            raise invalid(f"{flag}: {source} has no value; expected one or several, a line each")
    binary = flag.startswith("--grpc") and header.lower().endswith("-bin")
    if binary or not all(map(_VALUE.fullmatch, values)):
        raise invalid(f"{flag}: no client can send a header {header!r} with that value")
    return values


def _unknown(kind: str, name: str, known: tuple[str, ...]) -> BridgeError:
    return invalid(
        f"unknown restricted {kind.lower()} '{name}': expected one of {', '.join(known)}"
    )
