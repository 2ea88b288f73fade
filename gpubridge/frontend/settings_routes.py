"""The routes of the logging and trace extensions: GET shows settings, POST changes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from gpubridge.frontend.http.message import Exchange, RequestHandler
from gpubridge.frontend.settings_service import SettingsService
from gpubridge.frontend.small_body import SmallBody
from gpubridge.protocol import settings

__all__ = ["SettingsRoutes"]

_JSON = b"Content-Type: application/json\r\n"
_TRACE = re.compile(rb"/v2(?:/models/(?P<model>[^/]+))?/trace/setting")
_LOGGING = b"/v2/logging"

_Change = Callable[[bytes | None], bytes]
"""Takes a change's body, None for none; returns the settings that hold then."""


class _Handler(SmallBody):
    """Takes a request for settings."""

    __slots__ = ("_change", "_changes")

    def __init__(self, change: _Change, *, changes: bool) -> None:
        self._change = change
        super().__init__()
        self._changes = changes

    def complete(self, exchange: Exchange, copied: int) -> None:
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
        return settings.log_document(self._service.log(changes))

    def _trace(self, model: str, body: bytes | None) -> bytes:
        self._service.check_model(model)
        changes = {} if body is None else settings.trace_changes(body)
        return settings.trace_document(self._service.trace(model, changes))
