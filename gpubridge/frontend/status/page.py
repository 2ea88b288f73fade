"""The status page: one file, made of those in ``web/``, which shows the status document in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gpubridge.dataplane import HttpExchange
from gpubridge.errors import invalid
from gpubridge.frontend.control import Answer, ControlCall, ControlTasks
from gpubridge.frontend.control_routes import MODEL
from gpubridge.frontend.http.message import RequestHandler
from gpubridge.frontend.static_page import static_page
from gpubridge.frontend.status.document import STATUS_PATH, StatusDocument

_FOLDER = Path(__file__).with_name("web")
_SCRIPTS = ("elements", "figures", "models", "model", "graph", "attempt", "loop")
"""In the order in which the page runs them: each uses what those before it define."""
_METADATA = re.compile(MODEL)
_INFER = re.compile(MODEL + rb"/infer")
_OWN_HEADER = b"gpubridge-page"


class StatusPage:
    """The page, and what it asks for at the address that it came from.

    - ``open_model_request``: returns the handlers of requests for models; raises BridgeError.
    - ``sends``: whether the page may send inference requests.
    """

    def __init__(
        self,
        document: StatusDocument,
        open_model_request: Callable[[HttpExchange], RequestHandler],
        *,
        sends: bool,
    ) -> None:
        self._document = document
        self._open_model_request = open_model_request
        self._sends = sends
        self._tasks = ControlTasks()
        self._page = _page()

    def route(self, head: HttpExchange) -> RequestHandler | None:
        """Return the handler of a request of the page; None for another; raises BridgeError."""
        path = head.target.partition(b"?")[0]
        if head.method == b"POST" and self._sends and _INFER.fullmatch(path):
            # Browsers let no page of another origin send this header.
            if head.field(_OWN_HEADER) is None:
                raise invalid(
                    "only the status page sends requests here: send them to the HTTP port"
                )
            return self._open_model_request(head)
        if head.method != b"GET":
            return None
        if path == b"/":
            return ControlCall(lambda _: self._page, self._tasks)
        if path == STATUS_PATH:
            return self._document.open(head)
        return self._open_model_request(head) if _METADATA.fullmatch(path) else None


def _page() -> Answer:
    style = (_FOLDER / "page.css").read_bytes()
    script = b"\n".join((_FOLDER / f"{name}.js").read_bytes() for name in _SCRIPTS)
    return static_page((_FOLDER / "page.html").read_bytes(), style, script)
