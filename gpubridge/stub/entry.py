"""A stub's process from its first message to its exit code; it ends when the server does."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys

from gpubridge.stub.process import Stub
from gpubridge.transport.channel import Channel, ChannelClosed
from gpubridge.transport.messages import Kind, control_message, decode_control

_PR_SET_PDEATHSIG = 1


def run(fd: int, server_pid: int) -> int:
    """Serve the channel on descriptor ``fd`` until it closes; returns the exit code."""
    _die_with(server_pid)
    channel = Channel(socket.socket(fileno=fd))
    os.register_at_fork(after_in_child=channel.close)
    # Whole lines, whatever PYTHONUNBUFFERED says: other processes write to the same log.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        message, fds = channel.receive()
        channel.send(control_message(Kind.CONNECTED))
        stub = Stub(channel, decode_control(message), fds)
        return stub.serve() if stub.initialize() else 1
    except ChannelClosed as closed:
        cause = closed.__cause__
        if os.getppid() != server_pid or getattr(cause, "errno", 0) != errno.EBADF:
            # The server is gone, or this is a child that the model forked.
            return 0
        sys.stderr.write("the model closed its stub's channel to the server: the stub ends\n")
        return 1


def _die_with(server_pid: int) -> None:
    """Have the kernel kill this process when the server dies: a hung model reads no end of file."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server_pid:
        sys.exit(0)
