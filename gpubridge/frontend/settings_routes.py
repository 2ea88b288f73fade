"""The routes of the logging and trace extensions: GET shows settings, POST changes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from gpubridge.engine.repository import ModelRepository
from gpubridge.errors import invalid
from gpubridge.frontend.http.message import Exchange, RequestHandler
from gpubridge.frontend.small_body import SmallBody
from gpubridge.protocol import settings
from gpubridge.telemetry.logs import LogSettings
from gpubridge.telemetry.settings import TraceSettings

_JSON = b"Content-Type: application/json\r\n"
_TRACE = re.compile(rb"/v2(?:/models/(?P<model>[^/]+))?/trace/setting")
_LOGGING = b"/v2/logging"

_Change = Callable[[bytes | None], bytes]
"""Takes a change's body, None for none; returns the settings that hold then."""


class SettingsService:
    """Shows and changes the settings of the log and of traces.

    ``repository``: knows which models there are, and the server's telemetry.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._telemetry = repository.telemetry

    def log(self, changes: dict[str, Any]) -> LogSettings:
        """Apply changes of `LogSettings`, if there are any; returns what holds then."""
        log = self._telemetry.log
        if changes:
            log.change(**changes)
        return log.settings

    def check_model(self, model: str) -> None:
        """Refuse a model that is not loaded; empty for the server.

        Raises BridgeError: INVALID_ARG in Triton's words.
        """
        if model and not self._repository.versions(model):
            raise invalid(f"Request for unknown model : {model}")

    def trace(self, model: str, changes: dict[str, Any]) -> TraceSettings:
        """Apply changes of `TraceSettings` for a model or the server; returns what holds then.

        Raises BridgeError: INVALID_ARG for what makes no sense, and for a model that is not loaded.
        """
        self.check_model(model)
        traces = self._telemetry.traces
        if changes:
            traces.update(changes, model)
        return traces.settings(model)


class _Handler(SmallBody):
    """Takes a request for settings."""

    __slots__ = ("_change", "_changes")

    def __init__(self, change: _Change, *, changes: bool) -> None:
        self._change = change
        super().__init__()
        self._changes = changes

    def answer(self, exchange: Exchange) -> None:
        """Answer."""
        document = self._change(bytes(self.body) if self._changes else None)
        exchange.respond(200, _JSON, document, plain=True)


class SettingsRoutes:
    """Finds who takes a request for settings."""

    def __init__(self, service: SettingsService) -> None:
        self._service = service

    def takes(self, path: bytes) -> bool:
        """Whether a path is one of settings."""
        return path == _LOGGING or _TRACE.fullmatch(path) is not None

    def route(self, path: bytes, *, changes: bool) -> RequestHandler:
        """Return the handler of a request, on a path of settings, that shows or changes them."""
        match = _TRACE.fullmatch(path)
        if match is None:
            return _Handler(self._log, changes=changes)
        model = (match["model"] or b"").decode("utf-8", "surrogateescape")
        return _Handler(partial(self._trace, model), changes=changes)

    def _log(self, body: bytes | None) -> bytes:
        changes = {} if body is None else settings.log_changes(body)
        return orjson.dumps(settings.log_document(self._service.log(changes)))

    def _trace(self, model: str, body: bytes | None) -> bytes:
        self._service.check_model(model)
        changes = {} if body is None else settings.trace_changes(body)
        return orjson.dumps(settings.trace_document(self._service.trace(model, changes)))
