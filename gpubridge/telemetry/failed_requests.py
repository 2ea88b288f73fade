"""The log's lines of requests that failed by a fault of their model or of the server."""

from __future__ import annotations

import json
import logging
import time

from gpubridge.errors import BridgeError

_SHOWN = 128
_TEXT = 300
_A_SECOND = 20
"""Lines that are written in a second; further failures are counted, and the next line says how many."""
_logger = logging.getLogger(__name__)


class FailedRequests:
    """Writes a line for each failed request with its id and client; of the event loop's thread."""

    def __init__(self) -> None:
        self._numbered = 0
        self._second = self._lines = self._left_out = 0

    def log(self, error: BridgeError, protocol: str, client: str, number: int) -> None:
        """Log a request whose client gets an error, if that is a fault of the model or the server.

        - ``error``: its ``whose`` tells the model and the client's id.
        - ``number``: of the request in the access log, 0 without one; it stands for an id.
        """
        if not error.fault or not self._may_write():
            return
        statistics, identifier = error.whose or (None, "")
        if not identifier:
            self._numbered += 1
            identifier = f"#{number or self._numbered}"
        fields = {"id": identifier[:_SHOWN]}
        if statistics is not None:
            fields |= {"model": statistics.model, "version": str(statistics.version)}
        fields |= {"client": client, "protocol": protocol}
        told = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
        text = error.opening(_TEXT + 1).partition("\n")[0]
        text = f"{text[:_TEXT]}..." if len(text) > _TEXT else text
        left_out, self._left_out = self._left_out, 0
        others = f" ({left_out} others failed before it)" if left_out else ""
        _logger.error("request failed: %s: %s%s", told, text, others, extra=fields)

    def _may_write(self) -> bool:
        """Return whether there may be another line in this second; count one that may not."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= _A_SECOND:
            return True
        self._left_out += 1
        return False
