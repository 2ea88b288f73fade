"""One end of the socket pair between the server and a stub: whole messages and descriptors.

A message is one SEQPACKET datagram. The kernel limits its size, so a longer one is put into a memfd
and its descriptor is sent instead; the receiver does not see the difference.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Sequence

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.short_waits import ShortWaits

__all__ = ["FRAME_LIMIT", "Channel", "ChannelClosed", "MalformedMessage", "close_all", "pair"]

FRAME_LIMIT = 128 * 1024
"""Bytes of the longest message that is sent as one datagram."""

_SPILL_LIMIT = 256 * 1024 * 1024
_SPILL = struct.Struct("<BxxxQ")
_SPILL_KIND = 0
_MAX_FDS = 16
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
# Plain numbers: to join two of the socket module's flags takes as long as to receive a message.
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class ChannelClosed(BridgeError):
    """The other side of the channel is gone."""

    def __init__(self, message: str = "the channel to the other process is closed") -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


class MalformedMessage(BridgeError):
    """The other process sent something that is no message."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Make the two connected sockets of a channel; the caller owns both."""
    server, stub = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (server, stub):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_LIMIT)
    return server, stub


class Channel:
    """Sends and receives messages over one socket, which it owns."""

    __slots__ = ("_buffer", "_view", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = bytearray(FRAME_LIMIT)
        self._view = memoryview(self._buffer)

    def fileno(self) -> int:
        """The socket's descriptor, for an event loop."""
        return self.socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one message and the descriptors in ``fds`` (which stay the caller's).

        Returns
        -------
        bool
            False when the socket does not block and has no room: nothing was sent, try again.

        Raises
        ------
        ChannelClosed
            When the other side is gone.
        """
        try:
            if len(message) > FRAME_LIMIT:
                return self._send_spilled(message, fds)
            if fds:
                socket.send_fds(self.socket, [message], list(fds))
            else:
                self.socket.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        return True

    def receive(self) -> tuple[bytes, list[int]]:
        """Receive one message; the descriptors that came with it are the caller's to close.

        Raises
        ------
        ChannelClosed
            At the end of the stream.
        MalformedMessage
            When a message is longer than allowed.
        BlockingIOError
            When the socket does not block and nothing is there.
        """
        try:
            count, ancillary, flags, _ = self.socket.recvmsg_into(
                [self._buffer], _ANCILLARY, _RECEIVE_FLAGS
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed from error
        fds = _descriptors(ancillary) if ancillary else []
        if count == 0:
            close_all(fds)
            raise ChannelClosed
        if flags & _CUT:
            close_all(fds)
            raise MalformedMessage(
                f"a message of more than {FRAME_LIMIT} bytes or {_MAX_FDS} descriptors came"
            )
        message = bytes(self._view[:count])
        if message[0] == _SPILL_KIND:
            return _read_spilled(message, fds), fds
        return message, fds

    def poll(self, nanoseconds: int, waits: ShortWaits) -> bool:
        """Stay awake until `receive` would not wait, for so long at most; tell whether that is so.

        Given up early where others want the processor, which ``waits`` finds out.
        """
        end = time.monotonic_ns() + nanoseconds
        while time.monotonic_ns() < end:
            try:
                self.socket.recv(1, _LOOK)
            except BlockingIOError:
                if waits.offer_processor():
                    return False
            except OSError:
                return True
            else:
                return True
        return False

    def wait(self, seconds: float) -> bool:
        """Wait until `receive` would not wait, for so long at most; tell whether that is so."""
        looked = select.poll()
        looked.register(self.socket, select.POLLIN)
        return bool(looked.poll(seconds * 1000))

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.socket.close()

    def _send_spilled(self, message: bytes, fds: Sequence[int]) -> bool:
        spill = os.memfd_create("gpubridge-message", os.MFD_CLOEXEC)
        try:
            with open(spill, "wb", closefd=False) as file:
                file.write(message)
            notice = _SPILL.pack(_SPILL_KIND, len(message))
            socket.send_fds(self.socket, [notice], [spill, *fds])
        finally:
            os.close(spill)
        return True


def _read_spilled(notice: bytes, fds: list[int]) -> bytes:
    """Read the message that lies in ``fds[0]``; removes and closes that descriptor."""
    if len(notice) != _SPILL.size or not fds:
        close_all(fds)
        raise MalformedMessage("a notice of a long message came without its descriptor")
    spill = fds.pop(0)
    try:
        (size,) = _SPILL.unpack(notice)[1:]
        actual = os.fstat(spill).st_size
        if not 0 < size == actual <= _SPILL_LIMIT:
            raise MalformedMessage(
                f"a long message of {size} bytes was announced, its memory holds {actual} "
                f"(limit {_SPILL_LIMIT})"
            )
        message = os.pread(spill, size, 0)
    except OSError as error:
        close_all(fds)
        raise MalformedMessage(f"a long message of {size} bytes cannot be read: {error}") from error
    except BaseException:
        close_all(fds)
        raise
    finally:
        os.close(spill)
    return message


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
