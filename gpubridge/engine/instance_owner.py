"""What an instance asks of those around it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

from gpubridge.dataplane import ModelCounters
from gpubridge.engine.stub_connection import StubConnection
from gpubridge.errors import BridgeError
from gpubridge.request import CompletedBatch, InferRequest

if TYPE_CHECKING:
    from gpubridge.engine.instance import Instance


class CallDoor(Protocol):
    """The door that one stub's calls of other models come through."""

    def close(self) -> None:
        """The stub is gone: nobody waits for answers any more."""


class CallServer(Protocol):
    """Serves the calls that models make of other models."""

    def open(self, sock: socket.socket, link: StubConnection, caller: Instance, /) -> CallDoor:
        """Serve the channel ``sock``, which is owned from now on."""


class InstanceListener(Protocol):
    """Hears what becomes of an instance and of its requests; called on the event loop."""

    @property
    def counters(self) -> ModelCounters:
        """Counts the model's requests."""

    def on_up(self, instance: Instance, /) -> None:
        """It is ready, for the first time or again."""

    def on_room(self) -> None:
        """It may take more requests than before, or none any longer."""

    def on_batches(
        self, returning: list[InferRequest], traced: list[CompletedBatch], now: int, /
    ) -> None:
        """Batches were answered, or requests of earlier ones ended, at ``now``: there is room for others.

        Requests are to be executed again that are ``returning``; batches are ``traced`` if one of their
        requests is.
        """

    def on_death(
        self,
        instance: Instance,
        lost: list[InferRequest],
        unstarted: list[InferRequest],
        error: BridgeError,
        /,
    ) -> None:
        """Its process died: requests that it had started have no outcome but ``error``.

        The slots of the unstarted ones, in order, are theirs again.
        """
