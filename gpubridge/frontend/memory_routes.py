"""The paths by which clients register their memory over HTTP."""

from __future__ import annotations

import base64
import re
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from gpubridge.engine.client_regions import ClientRegion, ClientRegions
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.http.message import Exchange
from gpubridge.frontend.repository_control import ControlTasks
from gpubridge.frontend.small_body import SmallBody
from gpubridge.protocol.fields import JsonObject, internal, parse_json

MEMORY_PATH = re.compile(
    rb"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?"
    rb"/(?P<action>status|register|unregister)"
)
_HANDLE_BYTES = 64
_JSON = b"Content-Type: application/json\r\n"


class MemoryCall(SmallBody):
    """One call; its body, if any, says what is to be registered.

    - ``path``: of `MEMORY_PATH`.
    - ``regions``: the clients' own memory.
    - ``tasks``: does what takes longer.
    """

    __slots__ = ("_action", "_cuda", "_exchange", "_name", "_regions", "_tasks")

    def __init__(self, path: re.Match[bytes], regions: ClientRegions, tasks: ControlTasks) -> None:
        super().__init__()
        self._tasks = tasks
        self._exchange: Exchange | None = None
        self._cuda = path["kind"] == b"cuda"
        self._action = path["action"]
        self._name = unquote_to_bytes(path["region"] or b"").decode(errors="replace")
        self._regions = regions

    def answer(self, exchange: Exchange) -> None:
        """Do it and answer.

        Raises BridgeError as the registry says.
        """
        if self._cuda and self._action != b"status":
            # The driver is asked, or streams are given a moment.
            if self._action == b"register":
                work = self._regions.register_device(*self._device_memory())
            else:
                work = self._regions.unregister_device(self._name)
            self._exchange = exchange
            self._tasks.start(work, self._done)
            return
        exchange.respond(200, _JSON, self._answer(), plain=True)

    def abort(self) -> None:
        """Nobody waits for the answer; what was begun goes on."""
        self._exchange = None
        super().abort()

    def _done(self, error: BridgeError | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if error is not None:
            exchange.fail(error)
        else:
            exchange.respond(200, _JSON, b"", plain=True)

    def _answer(self) -> bytes:
        if self._action == b"register":
            self._register()
            return b""
        if self._action == b"status":
            regions = self._regions.status(self._name, on_device=self._cuda)
            return orjson.dumps([_described(region) for region in regions])
        if self._name:
            self._regions.unregister(self._name)
        else:
            self._regions.unregister_all()
        return b""

    def _document(self) -> Any:
        kind = "cuda" if self._cuda else "system"
        if not self._name:
            raise invalid(f"'region name' is necessary to register {kind} shared memory region")
        return parse_json(bytes(self.body))

    def _device_memory(self) -> tuple[str, bytes, int, int]:
        """Return what a client registers: name, handle, device and bytes."""
        document = self._document()
        raw = _field(document, "raw_handle")
        encoded = _field(raw, "b64")
        try:
            handle = base64.b64decode(encoded if type(encoded) is str else "", validate=True)
        except ValueError:
            handle = b""
        if len(handle) != _HANDLE_BYTES:
            raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        device_id = _number(_field(document, "device_id"))
        nbytes = _number(_field(document, "byte_size"))
        return self._name, handle, device_id, nbytes

    def _register(self) -> None:
        document = self._document()
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
    if region.on_device:
        return {
            "name": region.name,
            "device_id": region.device_id,
            "byte_size": region.nbytes,
        }
    return {
        "name": region.name,
        "key": region.key,
        "offset": region.offset,
        "byte_size": region.nbytes,
    }
