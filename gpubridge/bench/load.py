"""A load of one request after the other on each of some connections, over HTTP: closed or open.

A closed load sends a request when the one before it is answered. An open one sends requests at times of their
own, and latency counts from these times: a server that stands still is seen by every request that would have come.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from gpubridge.bench.arrivals import Followed, arrivals
from gpubridge.errors import BridgeError, invalid, unavailable

_LATE_START_NS = 50_000_000
"""So long after the threads are made the first request is meant to be sent."""
_OK = 200
_SCHEMES = ("http", "https")


@dataclass(frozen=True)
class Request:
    """A request that is sent again and again: the path, the body and its headers."""

    path: str
    body: bytes
    headers: dict[str, str]


@dataclass(frozen=True)
class Bounds:
    """End of a load: after so many seconds, and after so many requests, if that is not None.

    ``timeout``: seconds after which a request without an answer has failed.
    """

    seconds: float
    requests: int | None = None
    timeout: float = 60.0


@dataclass
class Failures:
    """Number of requests that failed, and the first reason."""

    count: int = 0
    first: str = ""


class Server:
    """The server at a URL; makes connections."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise invalid(
                f"expected the URL of a server's HTTP port, http://HOST:PORT, got {url!r}"
            )
        self._parts = parts
        self._timeout = timeout

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection; it is made with the first request."""
        parts = self._parts
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self._timeout, context=context
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self._timeout)

    def get(self, path: str, headers: dict[str, str]) -> bytes:
        """Return the body of a document; raises BridgeError."""
        connection = self.connect()
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise unavailable(f"{self._parts.geturl()} does not answer: {error!r}") from error
        finally:
            connection.close()
        if answer.status != _OK:
            raise BridgeError(f"{path}: {answer.status}: {body[:500].decode(errors='replace')}")
        return body


class Load:
    """Sends requests on connections with a thread each; `run` returns the times of those answered.

    ``rate``: requests/s of an open load; None for a closed one.
    """

    def __init__(
        self, server: Server, request: Request, connections: int, bounds: Bounds, rate: float | None
    ) -> None:
        self._server = server
        self._request = request
        self._connections = connections
        self._bounds = bounds
        self._rate = rate
        self._lock = threading.Lock()
        self._rows: list[tuple[int, int, int, int]] = []
        self.failures = Failures()

    def run(self) -> Followed:
        """Load the server until the bounds; raises BridgeError if no request was answered."""
        self._turns = self._meant()
        threads = [
            threading.Thread(target=self._send, daemon=True) for _ in range(self._connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self._rows:
            raise BridgeError(f"no request was answered: {self.failures.first}")
        meant, sendable, sent, answered = np.array(self._rows, np.int64).T
        return Followed(meant, sendable, sent, answered, self.failures.count, first=False)

    def _meant(self) -> Iterator[int]:
        """Yield the time that each request is meant to be sent; 0 for as soon as possible."""
        bounds, start = self._bounds, time.monotonic_ns() + _LATE_START_NS
        if self._rate is not None:
            schedule = arrivals(self._rate, bounds.seconds, seed=0)
            yield from (start + int(at) for at in schedule[: bounds.requests])
            return
        end = start + int(bounds.seconds * 1e9)
        sent = 0
        while time.monotonic_ns() < end and (bounds.requests is None or sent < bounds.requests):
            sent += 1
            yield 0

    def _next(self) -> int | None:
        with self._lock:
            return next(self._turns, None)

    def _send(self) -> None:
        connection = self._server.connect()
        free = time.monotonic_ns()
        while (meant := self._next()) is not None:
            wait = meant - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            sent = time.monotonic_ns()
            fault = self._exchange(connection)
            answered = time.monotonic_ns()
            with self._lock:
                if fault:
                    self.failures.count += 1
                    self.failures.first = self.failures.first or fault
                else:
                    self._rows.append((meant or sent, max(meant or sent, free), sent, answered))
            free = answered
        connection.close()

    def _exchange(self, connection: http.client.HTTPConnection) -> str:
        """Send the request and read its answer; return why it failed."""
        request = self._request
        try:
            connection.request("POST", request.path, request.body, request.headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return repr(error)
        return (
            ""
            if answer.status == _OK
            else f"{answer.status}: {body[:500].decode(errors='replace')}"
        )
