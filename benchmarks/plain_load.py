"""The load generator of last resort: one blocking socket per thread."""

from __future__ import annotations

import socket
import threading
import time

from benchmarks.payloads import Payload

_RECEIVE_BYTES = 1 << 18


def send_requests(
    payload: Payload, port: int, connections: int, seconds: float
) -> tuple[list[float], int, float]:
    """Send ``payload`` on ``connections`` sockets at once until ``seconds`` have passed.

    Returns
    -------
    The latency in seconds of every answered request, the number of failed ones (a connection
    that breaks stops and counts as one), and the seconds that passed in all.
    """
    request = _request_bytes(payload)
    latencies: list[float] = []
    failures: list[str] = []
    started = time.monotonic()
    deadline = started + seconds

    def work() -> None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (begin := time.monotonic()) < deadline:
                    connection.sendall(request)
                    if _receive_status(connection) == 200:
                        latencies.append(time.monotonic() - begin)
                    else:
                        failures.append("status")
        except (OSError, ValueError) as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, len(failures), time.monotonic() - started


def _request_bytes(payload: Payload) -> bytes:
    body = payload.body()
    head = (
        f"POST {payload.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {len(payload.header())}\r\n\r\n"
    )
    return head.encode() + body


def _receive_status(connection: socket.socket) -> int:
    """Read one whole answer (which must state its length) and return its status."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(connection)
    head, _, rest = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value for name, _, value in (s.partition(":") for s in lines)}
    missing = int(fields.get("content-length", "not stated")) - len(rest)
    while missing > 0:
        missing -= len(_receive(connection))
    return int(status.split()[1])


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(_RECEIVE_BYTES)
    if not data:
        message = "the server closed the connection within an answer"
        raise ConnectionError(message)
    return data
