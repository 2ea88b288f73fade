"""A stub in a process that somebody else has started: a developer's, with a terminal and a debugger."""

from __future__ import annotations

import socket
from typing import Callable

from gpubridge.pb_utils import host
from gpubridge.stub.process import Stub
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.messages import decode_control

__all__ = ["run_here"]


def run_here(sock: socket.socket, note: Callable[[BaseException], None]) -> int:
    """Serve a channel in this thread until it closes; returns the stub's exit code.

    Parameters
    ----------
    sock : socket.socket
        The stub's end of the channel; closed here.
    note : callable
        Is told of what the model raises, in the thread that raised it, while its traceback is there.
    """
    channel = Channel(sock)
    try:
        message, fds = channel.receive()
        stub = Stub(channel, decode_control(message), fds, note)
        return stub.serve() if stub.initialize() else 1
    except ChannelClosed:
        return 0
    finally:
        host.detach()
        channel.close()
