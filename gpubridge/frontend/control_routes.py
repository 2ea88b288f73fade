"""HTTP control routes: health, metadata, statistics, settings, model loading, shared memory."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import orjson

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.client_regions import ClientRegions
from gpubridge.engine.models.model import Model
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.errors import BridgeError, invalid
from gpubridge.frontend.answered import HTTP_NUMBERS
from gpubridge.frontend.control import (
    PLAIN,
    Answer,
    ControlCall,
    ControlTasks,
    check_traced,
    is_ready,
    trace_settings,
)
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.protocol import control, metadata
from gpubridge.protocol.control import read_load, read_unload
from gpubridge.protocol.fields import parse_json, wrong_type

MODEL = rb"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
_REPOSITORY = rb"/v2/repository/models/(?P<model>[^/]+)/"
_MEMORY = rb"/v2/(?P<kind>system|cuda)sharedmemory(?:/region/(?P<region>[^/]+))?/"
_TRACE = rb"/v2(?:/models/(?P<model>[^/]+))?/trace/setting"
_HANDLE_BYTES = 64

_Answer = Answer | Coroutine[Any, Any, Answer]


class Route(NamedTuple):
    """A route: a pattern of paths, a method, and the handlers of its requests.

    - ``group``: the restricted API that it belongs to.
    - ``open``: returns the handler of a request.
    - ``endpoint``: the name by which its requests are counted, if that is not the group's.
    """

    group: str
    paths: re.Pattern[bytes]
    method: bytes
    open: Callable[[re.Match[bytes], HttpExchange], RequestHandler]
    endpoint: str = ""

    @property
    def number(self) -> int:
        """The number by which its requests are counted."""
        return HTTP_NUMBERS[self.endpoint or self.group]


class ControlRoutes:
    """The control routes of the server and its models.

    Each answering method gets the match of the path, and the body.

    - ``ready``: returns whether the server is ready.
    """

    def __init__(
        self, repository: ModelRepository, regions: ClientRegions, ready: Callable[[], bool]
    ) -> None:
        self._repository = repository
        self._regions = regions
        self._ready = ready
        self._tasks = ControlTasks()
        self.routes: list[Route] = [
            self._route("metadata", b"GET", rb"/v2", self._server),
            self._route("health", b"GET", rb"/v2/health/(live|ready)", self._health),
            self._route("statistics", b"GET", rb"/v2/models/stats", self._statistics),
            self._route("statistics", b"GET", MODEL + rb"/stats", self._statistics),
            self._route("metadata", b"GET", MODEL, self._metadata),
            self._route("health", b"GET", MODEL + rb"/ready", self._readiness),
            self._route("model-config", b"GET", MODEL + rb"/config", self._config),
            self._route("logging", b"GET", rb"/v2/logging", self._log),
            self._route("logging", b"POST", rb"/v2/logging", self._change_log),
            self._route("trace", b"GET", _TRACE, self._trace),
            self._route("trace", b"POST", _TRACE, self._change_trace),
            self._route("shared-memory", b"GET", _MEMORY + b"status", self._memory_status),
            self._route("shared-memory", b"POST", _MEMORY + b"register", self._register),
            self._route("shared-memory", b"POST", _MEMORY + b"unregister", self._unregister),
            self._route("model-repository", b"POST", rb"/v2/repository/index", self._index),
            self._route("model-repository", b"POST", _REPOSITORY + rb"unload", self._unload),
            Route("model-repository", re.compile(_REPOSITORY + rb"load"), b"POST", self._open_load),
        ]

    def _route(
        self,
        group: str,
        method: bytes,
        pattern: bytes,
        answer: Callable[[re.Match[bytes], bytes], _Answer],
    ) -> Route:
        def open_call(path: re.Match[bytes], _: HttpExchange) -> ControlCall:
            return ControlCall(lambda call: answer(path, bytes(call.body)), self._tasks)

        return Route(group, re.compile(pattern), method, open_call)

    # -- the server and its models ---------------------------------------------------------------

    def _server(self, path: re.Match[bytes], body: bytes) -> Answer:
        return document(metadata.server_metadata(self._repository.server_id))

    def _health(self, path: re.Match[bytes], body: bytes) -> Answer:
        healthy = path[1] == b"live" or self._ready()
        return Answer(fields=PLAIN, status=200 if healthy else 400)

    def _statistics(self, path: re.Match[bytes], body: bytes) -> Answer:
        models: Iterable[Model] = self._repository.loaded()
        if path.groupdict():
            models = self._repository.selected(*named(path))
        return document(metadata.model_statistics(model.statistics for model in models))

    def _metadata(self, path: re.Match[bytes], body: bytes) -> Answer:
        name, version = named(path)
        config = self._repository.find(name, version).config
        versions = self._repository.versions(name) if version is None else [version]
        return document(metadata.model_metadata(config, versions))

    def _config(self, path: re.Match[bytes], body: bytes) -> Answer:
        return Answer(self._repository.find(*named(path)).config.to_json().encode())

    async def _readiness(self, path: re.Match[bytes], body: bytes) -> Answer:
        name, version = named(path)
        try:
            ready = await is_ready(self._repository.find(name, version))
        except BridgeError:
            ready = False
        if not ready:
            raise invalid("Model version not ready")
        return Answer(fields=PLAIN)

    # -- the repository --------------------------------------------------------------------------

    async def _index(self, path: re.Match[bytes], body: bytes) -> Answer:
        ready_only = metadata.ready_models_only(body)
        rows = await self._repository.listed()
        if ready_only:
            rows = [row for row in rows if row.state == "READY"]
        return document(metadata.repository_index(rows))

    def _open_load(self, path: re.Match[bytes], exchange: HttpExchange) -> ControlCall:
        # Before a long body is received.
        self._repository.check_control()
        name = text_of(path["model"])
        return ControlCall(lambda call: self._load(name, call, call.body), self._tasks, math.inf)

    async def _load(self, name: str, call: ControlCall, body: memoryview) -> Answer:
        # Decoding base64 may take long, so it runs in a thread.
        config, files = await asyncio.to_thread(lambda: read_load(bytes(body)))
        call.release()
        await self._repository.load(name, config, files)
        return Answer()

    async def _unload(self, path: re.Match[bytes], body: bytes) -> Answer:
        self._repository.check_control()
        await self._repository.unload(text_of(path["model"]), dependents=read_unload(body))
        return Answer()

    # -- settings --------------------------------------------------------------------------------

    def _log(self, path: re.Match[bytes], body: bytes) -> Answer:
        return document(control.log_document(self._repository.telemetry.log.settings))

    def _change_log(self, path: re.Match[bytes], body: bytes) -> Answer:
        self._repository.telemetry.log.change(**control.log_changes(body))
        return self._log(path, body)

    def _trace(self, path: re.Match[bytes], body: bytes) -> Answer:
        traced = trace_settings(self._repository, text_of(path["model"] or b""), {})
        return document(control.trace_document(traced))

    def _change_trace(self, path: re.Match[bytes], body: bytes) -> Answer:
        model = text_of(path["model"] or b"")
        check_traced(self._repository, model)
        traced = trace_settings(self._repository, model, control.trace_changes(body))
        return document(control.trace_document(traced))

    # -- clients' memory -------------------------------------------------------------------------

    def _memory_status(self, path: re.Match[bytes], body: bytes) -> Answer:
        regions = self._regions.status(_region(path), on_device=path["kind"] == b"cuda")
        return document([region.described() for region in regions])

    def _register(self, path: re.Match[bytes], body: bytes) -> _Answer:
        name, kind = _region(path), path["kind"].decode()
        if not name:
            raise invalid(f"'region name' is necessary to register {kind} shared memory region")
        given = parse_json(body)
        if kind == "cuda":
            return _done(self._regions.register_device(name, *_device_memory(given)))
        key = _field(given, "key")
        if type(key) is not str:
            raise wrong_type(key, "string", where=" as 'key'")
        nbytes = _number(given, "byte_size")
        offset = _number(given, "offset") if "offset" in given else 0
        self._regions.register(name, key, offset, nbytes)
        return Answer()

    def _unregister(self, path: re.Match[bytes], body: bytes) -> _Answer:
        if path["kind"] == b"cuda":
            return _done(self._regions.unregister_device(_region(path)))
        self._regions.unregister(_region(path))
        return Answer()


def document(content: Any) -> Answer:
    """Return a JSON response."""
    return Answer(orjson.dumps(content))


def text_of(name: bytes) -> str:
    """Return the percent-decoded name of a model in a path."""
    return unquote_to_bytes(name).decode(errors="replace")


def named(path: re.Match[bytes]) -> tuple[str, int | None]:
    """Return the model and the version in a path that matches `MODEL`; raises BridgeError."""
    digits: bytes | None = path["version"]
    if digits is None:
        return text_of(path["model"]), None
    version = int(digits) if len(digits) < 25 else 1 << 64
    if version >= 1 << 63:
        raise invalid(
            f"failed to get model version from specified version string '{digits.decode()}' (details: "
            "stol), version should be an integral value > 0"
        )
    return text_of(path["model"]), version


async def _done(work: Coroutine[Any, Any, None]) -> Answer:
    """Return an empty response once a coroutine has ended."""
    await work
    return Answer()


def _region(path: re.Match[bytes]) -> str:
    return unquote_to_bytes(path["region"] or b"").decode(errors="replace")


def _device_memory(given: Any) -> tuple[bytes, int, int]:
    """Return the handle, device and size of device memory that a client registers."""
    encoded = _field(_field(given, "raw_handle"), "b64")
    try:
        handle = control.decode_base64(encoded if type(encoded) is str else "")
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_BYTES:
        raise invalid("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle, _number(given, "device_id"), _number(given, "byte_size")


def _field(document: object, name: str) -> object:
    if type(document) is not dict or name not in document:
        raise invalid(f"Shared memory register request has no '{name}' field")
    return document[name]


def _number(document: Any, name: str) -> int:
    value = _field(document, name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise wrong_type(value, "unsigned-integer", where=f" as '{name}'")
    return value
