"""The paths by which clients register their memory over HTTP."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import orjson

from gpubridge.engine.client_regions import ClientRegion, ClientRegions
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.http.message import Exchange
from gpubridge.frontend.shared_memory import CUDA_REFUSAL
from gpubridge.frontend.small_body import SmallBody
from gpubridge.protocol.fields import JsonObject, internal, invalid, parse_json

__all__ = ["MEMORY_PATH", "MemoryCall"]

MEMORY_PATH = re.compile(
    rb"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?"
    rb"/(?P<action>status|register|unregister)"
)
_JSON = b"Content-Type: application/json\r\n"


class MemoryCall(SmallBody):
    """One call; its body, if any, says what is to be registered.

    Parameters
    ----------
    path : re.Match
        Of `MEMORY_PATH`.
    regions : ClientRegions
        The clients' own memory.
    """

    __slots__ = ("_action", "_cuda", "_name", "_regions")

    def __init__(self, path: re.Match[bytes], regions: ClientRegions) -> None:
        super().__init__()
        self._cuda = path["kind"] == b"cuda"
        self._action = path["action"]
        self._name = unquote_to_bytes(path["region"] or b"").decode(errors="replace")
        self._regions = regions

    def complete(self, exchange: Exchange, copied: int) -> None:
        """Do it and answer.

        Raises
        ------
        BridgeError
            As the registry says.
        """
        exchange.respond(200, _JSON, self._answer(), plain=True)

    def _answer(self) -> bytes:
        if self._action == b"register":
            self._register()
            return b""
        if self._cuda:
            return self._cuda_answer()
        if self._action == b"status":
            return orjson.dumps([_described(r) for r in self._regions.status(self._name)])
        if self._name:
            self._regions.unregister(self._name)
        else:
            self._regions.unregister_all()
        return b""

    def _cuda_answer(self) -> bytes:
        if self._action != b"status":
            return b""
        if self._name:
            raise BridgeError(
                f"Unable to find cuda shared memory region: '{self._name}'", ErrorCode.NOT_FOUND
            )
        return b"[]"

    def _register(self) -> None:
        kind = "cuda" if self._cuda else "system"
        if not self._name:
            raise invalid(f"'region name' is necessary to register {kind} shared memory region")
        if self._cuda:
            raise BridgeError(
                f"cannot register '{self._name}': {CUDA_REFUSAL}", ErrorCode.UNSUPPORTED
            )
        document = parse_json(bytes(self._body))
        key = _field(document, "key")
        if type(key) is not str:
            raise internal("attempt to access JSON non-string as string")
        nbytes = _number(_field(document, "byte_size"))
        offset = _number(document.get("offset", 0))
        self._regions.register(self._name, key, offset, nbytes)


def _field(document: object, name: str) -> object:
    if type(document) is not dict or name not in document:
        raise invalid(f"Shared memory register request has no '{name}' field")
    return document[name]


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def _described(region: ClientRegion) -> JsonObject:
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset,
        "byte_size": region.nbytes,
    }
