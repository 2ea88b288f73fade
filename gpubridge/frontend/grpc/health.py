"""grpc.health.v1: whether the server takes requests, once or at every change."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc.call import Opening, SingleMessageCall
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.protocol.grpc import control
from gpubridge.protocol.grpc.infer_response import encode_frame

_SERVICES = frozenset(("", "inference.GRPCInferenceService", "grpc.health.v1.Health"))


class Health:
    """State of the health service, and the watches that hear of changes."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._watches: set[HealthWatch] = set()

    def answer(self, message: bytes) -> bytes:
        """Answer Check; the service that is asked for does not matter, as with Triton.

        Raises BridgeError: INTERNAL for bytes that are no message.
        """
        control.health_service(message)
        return control.health_answer(self._ready())

    def status_of(self, service: str) -> bytes:
        """Return what a watch of a service is told now."""
        return control.health_answer(self._ready() if service in _SERVICES else None)

    def add(self, watch: HealthWatch) -> None:
        """Tell a watch of changes."""
        self._watches.add(watch)

    def discard(self, watch: HealthWatch) -> None:
        """Tell it no more."""
        self._watches.discard(watch)

    def check(self, now: float) -> None:
        """Tell the watches if something has changed."""
        for watch in list(self._watches):
            watch.update()


class HealthWatch(SingleMessageCall):
    """A call of Watch: the state at once, then at every change, until the client leaves."""

    def __init__(self, opening: Opening, health: Health) -> None:
        super().__init__(opening)
        self._health = health
        self._service = ""
        self._last = b""

    def complete(self, message: bytes, compressed: bool) -> None:
        """Take the request, and begin to tell."""
        if compressed:
            self._complete_packed(message)
            return
        try:
            self._service = control.health_service(message)
        except (BridgeError, CallFailed) as error:
            self.fail(error)
        else:
            self._health.add(self)
            self.update()

    def update(self) -> None:
        """Tell the state if it is not what was told last."""
        status = self._health.status_of(self._service)
        if status != self._last:
            self._last = status
            self._tell()
            self._connection.http2.send_data(self._stream_id, [encode_frame(status)])
            self._connection.flush_soon()

    def cut_short(self) -> None:
        """The client can neither stay nor leave properly any more."""
        self.fail(
            CallFailed(Status.CANCELLED, "expected the client to leave by itself, it hung up")
        )

    def drain(self) -> None:
        """The server stops, which the client was told as a change."""
        self.fail(CallFailed(Status.UNAVAILABLE, "the server is stopping"))

    def _settle(self) -> None:
        self._health.discard(self)
        super()._settle()
