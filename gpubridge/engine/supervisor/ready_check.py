"""Readiness check by a model's own ``is_ready``, in its stub."""

from __future__ import annotations

import asyncio
import json
import os
import socket

from gpubridge.errors import unavailable
from gpubridge.transport.channel import MalformedMessage

_LIMIT_SECONDS = 5.0
_LONGEST_ANSWER = 64 * 1024


class ReadyCheck:
    """Asks an instance's stub; concurrent callers share one call of ``is_ready``."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._flight: asyncio.Future[str] | None = None

    @property
    def connected(self) -> bool:
        """Return whether the stub has a model with ``is_ready``."""
        return self._socket is not None

    def connect(self, fd: int) -> None:
        """Take over the socket on which the stub answers checks; raises MalformedMessage."""
        self.close()
        try:
            self._socket = socket.socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise MalformedMessage(
                f"the descriptor for readiness checks is no socket: {error}"
            ) from error
        self._socket.setblocking(False)
        self._loop.add_reader(fd, self._on_readable)

    async def ask(self) -> None:
        """Return when the model reports that it is ready.

        Raises BridgeError: UNAVAILABLE, with the reason, when it reports that it is not, or does not
        answer within five seconds.
        """
        flight = self._flight
        whose = "in-flight"
        if flight is None:
            whose = "user-defined"
            flight = self._begin()
        # Also a call that was too slow for an earlier caller: its answer is the newest.
        await asyncio.wait([flight], timeout=_LIMIT_SECONDS)
        reason = f"Timed out waiting for {whose} is_ready() response"
        if flight.done():
            reason = flight.result()
        if reason:
            raise unavailable(reason)

    def _begin(self) -> asyncio.Future[str]:
        flight = self._flight = self._loop.create_future()
        try:
            if self._socket is None:
                raise ConnectionError
            self._socket.send(b"?")
        except OSError:
            self._end(self._unhealthy)
        return flight

    def _on_readable(self) -> None:
        try:
            assert self._socket is not None
            answer = self._socket.recv(_LONGEST_ANSWER)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer:
            self.close()
            return
        try:
            fields = json.loads(answer)
            ready, reason = fields["ready"], str(fields.get("error", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            ready, reason = False, "its answer to is_ready() cannot be read"
        failed = f"Model '{self._instance}' is not ready (user-defined check failed)."
        self._end("" if ready is True else reason or failed)

    def _end(self, reason: str) -> None:
        flight, self._flight = self._flight, None
        if flight is not None and not flight.done():
            flight.set_result(reason)

    @property
    def _unhealthy(self) -> str:
        return f"Stub process '{self._instance}' is not healthy."

    def close(self) -> None:
        """Close the socket of a dead stub; idempotent."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._end(self._unhealthy)
