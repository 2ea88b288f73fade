"""The pages at ``/`` and ``/docs`` of the HTTP port, and the document that the second one shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubridge.dataplane import HttpExchange
from gpubridge.engine.repository.repository import ModelRepository
from gpubridge.frontend.api.document import OpenApiDocument
from gpubridge.frontend.control import ControlCall, ControlTasks
from gpubridge.frontend.control_routes import Route
from gpubridge.frontend.static_page import static_page

_FOLDER = Path(__file__).parent


class ApiPages:
    """The routes of the pages; all of them belong to the restricted group ``metadata``."""

    def __init__(self, repository: ModelRepository) -> None:
        self._tasks = ControlTasks()
        self._document = OpenApiDocument(repository)
        self._calls = static_page((_FOLDER / "calls.html").read_bytes())
        self.show_port(0, status_page=False)
        self.routes = [
            self._route(rb"/", lambda _: self._links),
            self._route(rb"/docs", lambda _: self._calls),
            self._route(rb"/v2/openapi\.json", lambda _: self._document.answer()),
        ]

    def show_port(self, port: int, *, status_page: bool) -> None:
        """Link the metrics, and the status page if it is served, at a port; at port 0 neither."""
        page = (_FOLDER / "links.html").read_bytes()
        for name, given in ((b"METRICS_PORT", port), (b"STATUS_PORT", port * status_page)):
            page = page.replace(b'data-port="%b"' % name, b'data-port="%d"' % given)
        self._links = static_page(page)

    def _route(self, path: bytes, answer: Callable[[ControlCall], Any]) -> Route:
        def open_call(_: re.Match[bytes], __: HttpExchange) -> ControlCall:
            return ControlCall(answer, self._tasks)

        return Route("metadata", re.compile(path), b"GET", open_call)
