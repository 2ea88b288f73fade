"""The arena that the server offers a stub: another one, where it cannot be opened.

By what device memory crosses processes is found out here: nobody else can open what the server has made.
"""

from __future__ import annotations

from typing import Any

from gpubridge.transport.channel import Channel, close_all
from gpubridge.transport.messages import Kind, control_message, decode_control

__all__ = ["ArenaOffers"]


class ArenaOffers:
    """The offers of one server to one stub, which has heard nothing else so far.

    Parameters
    ----------
    channel : Channel
        To the server.
    fields : dict or None
        Field ``device`` of the INITIALIZE message; None for a stub without a device.
    fds : list of int
        The descriptors of that offer; owned from now on.

    Attributes
    ----------
    fields : dict or None
        What is offered now: ``region``, ``size``, ``handle`` (empty where there is a descriptor), or a
        ``reason`` why nothing is; ``events``, ``no_events``, ``uuid`` and ``server``, the server's
        process id.
    """

    def __init__(self, channel: Channel, fields: dict[str, Any] | None, fds: list[int]) -> None:
        self._channel = channel
        self.fields = fields
        self._fds = fds
        self._early: list[tuple[bytes, list[int]]] = []

    def take_fds(self) -> list[int]:
        """Return the descriptors of the offer, which are the caller's now."""
        fds, self._fds = self._fds, []
        return fds

    def refuse(self, reason: str) -> None:
        """Say that the memory cannot be opened; `fields` are those of the next offer on return.

        Raises
        ------
        ChannelClosed
            The server is gone.
        """
        self.close()
        self._channel.send(control_message(Kind.ARENA_REFUSED, reason=reason))
        while True:
            message, fds = self._channel.receive()
            if message[0] == Kind.ARENA:
                self.fields, self._fds = decode_control(message), fds
                return
            # Another stub of the model may have completed its configuration meanwhile.
            self._early.append((message, fds))

    def next_message(self) -> tuple[bytes, list[int]]:
        """Return the server's next message, as `Channel.receive` does."""
        return self._early.pop(0) if self._early else self._channel.receive()

    def close(self) -> None:
        """Close descriptors that nobody has taken."""
        close_all(self.take_fds())
