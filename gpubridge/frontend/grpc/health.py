"""grpc.health.v1: Check and Watch of the server's readiness."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc.call import Opening, SingleMessageCall
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.protocol.grpc import control
from gpubridge.protocol.grpc.infer_response import encode_frame

_SERVICES = frozenset(("", "inference.GRPCInferenceService", "grpc.health.v1.Health"))


class Health:
    """State of the health service, and the Watch calls that receive changes."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._watches: set[HealthWatch] = set()

    def answer(self, message: bytes) -> bytes:
        """Return the response of Check; as in Triton, for any service.

        Raises BridgeError: INTERNAL for a malformed message.
        """
        control.health_service(message)
        return control.health_answer(self._ready())

    def status_of(self, service: str) -> bytes:
        """Return the current response of Watch for a service."""
        return control.health_answer(self._ready() if service in _SERVICES else None)

    def add(self, watch: HealthWatch) -> None:
        """Add a Watch call, which is updated at every change."""
        self._watches.add(watch)

    def discard(self, watch: HealthWatch) -> None:
        """Remove a Watch call."""
        self._watches.discard(watch)

    def check(self, now: float) -> None:
        """Update the Watch calls, if the state has changed."""
        for watch in list(self._watches):
            watch.update()


class HealthWatch(SingleMessageCall):
    """A Watch call: sends the state at once, then at every change, until the client ends the call."""

    def __init__(self, opening: Opening, health: Health) -> None:
        super().__init__(opening)
        self._health = health
        self._service = ""
        self._last = b""

    def complete(self, message: bytes | memoryview, compressed: bool) -> None:
        """Send the state of the service that the message names."""
        if compressed:
            self._complete_packed(message)
            return
        try:
            self._service = control.health_service(message)
        except (BridgeError, CallFailed) as error:
            self.fail(error)
        else:
            self._drop_message()
            self._health.add(self)
            self.update()

    def update(self) -> None:
        """Send the state if it differs from the last one sent."""
        status = self._health.status_of(self._service)
        if status != self._last:
            self._last = status
            self._send_headers()
            self._connection.http2.send_data(self._stream_id, [encode_frame(status)])
            self._connection.flush_soon()

    def input_ended(self) -> None:
        """Fail: the client has closed its sending side without ending the call."""
        self.fail(
            CallFailed(Status.CANCELLED, "expected the client to leave by itself, it hung up")
        )

    def drain(self) -> None:
        """Fail: the server is stopping, which was sent as a change."""
        self.fail(CallFailed(Status.UNAVAILABLE, "the server is stopping"))

    def _release(self) -> None:
        self._health.discard(self)
        super()._release()
