"""Channel between the server and a stub: sends whole messages and descriptors over a socket pair.

A message is one SEQPACKET datagram. The kernel limits its size, so a longer one is written to a memfd
whose descriptor is sent instead; `Channel.receive` returns both alike.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import select
import socket
import struct
from collections.abc import Sequence

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.tensor.native import native
from gpubridge.transport.wait_predictor import WaitPredictor

FRAME_LIMIT = 128 * 1024
"""Bytes of the longest message that is sent as one datagram."""

_SPILL_LIMIT = 256 * 1024 * 1024
_SPILL = struct.Struct("<BxxxQ")
_SPILL_KIND = 0
_MAX_FDS = 16
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
# Plain numbers: combining two of the socket module's flags takes as long as receiving a message.
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class ChannelClosed(BridgeError):
    """The other process has closed its end of the channel."""

    def __init__(self, message: str = "the channel to the other process is closed") -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


class DescriptorsLost(BridgeError):
    """Descriptors of a message were lost: this process has reached its limit of them.

    ``datagram``: the message without them.
    """

    datagram = b""


class MalformedMessage(BridgeError):
    """The other process sent an invalid message."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Make the two connected sockets of a channel; the caller owns both."""
    server, stub = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (server, stub):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_LIMIT)
    return server, stub


class Channel:
    """Sends and receives messages over one socket, which it owns."""

    __slots__ = ("_receive", "_scratch", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._scratch = bytearray(FRAME_LIMIT)
        compiled = native()
        self._receive = _receive if compiled is None else compiled.receive_message

    def fileno(self) -> int:
        """Return the socket's descriptor, for an event loop."""
        return self.socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one message and the descriptors in ``fds``, which stay the caller's.

        Returns False if the socket is non-blocking and its buffer is full: nothing was sent.
        """
        try:
            if len(message) > FRAME_LIMIT:
                notice, spilled = spill((message,))
                try:
                    socket.send_fds(self.socket, [notice], [spilled, *fds])
                finally:
                    os.close(spilled)
                return True
            if fds:
                socket.send_fds(self.socket, [message], list(fds))
            else:
                self.socket.send(message)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed from error
        return True

    def receive(self, longest: int | None = None) -> tuple[bytes, list[int]]:
        """Receive one message, and descriptors that the caller must close.

        A message of more than ``longest`` bytes stays unread, see `is_unread`. Raises ChannelClosed at
        the end of input, MalformedMessage for a message that is too long, BlockingIOError if a
        non-blocking socket has none.
        """
        try:
            message, fds, cut = self._receive(self.socket.fileno(), self._scratch)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed from error
        if message and not (fds or cut) and message[0] != _SPILL_KIND:
            return message, fds
        return self.whole(message, fds, cut, longest)

    def whole(
        self, message: bytes, fds: list[int], cut: bool, longest: int | None = None
    ) -> tuple[bytes, list[int]]:
        """Turn a received datagram into the result of `receive`; raises as that does.

        Also DescriptorsLost, where the kernel could not give this process the descriptors.
        """
        if not message:
            close_all(fds)
            raise ChannelClosed
        if cut and len(message) < FRAME_LIMIT and len(fds) < _MAX_FDS:
            # Else there would be more of either.
            close_all(fds)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            lost = DescriptorsLost(
                f"the limit of {limit} open descriptors (ulimit -n) is reached: those of a message were "
                "lost",
                ErrorCode.UNAVAILABLE,
            )
            lost.datagram = message
            raise lost
        if cut:
            close_all(fds)
            raise MalformedMessage(
                f"a message of more than {FRAME_LIMIT} bytes or {_MAX_FDS} descriptors came"
            )
        if message[0] != _SPILL_KIND:
            return message, fds
        if len(message) != _SPILL.size or not fds:
            close_all(fds)
            raise MalformedMessage("a notice of a long message came without its descriptor")
        if longest is not None and _SPILL.unpack(message)[1] > longest:
            return message, fds
        return read_spilled(message, fds), fds

    def poll(self, nanoseconds: int, waits: WaitPredictor) -> bool:
        """Poll until `receive` would not wait, at most for a time; return whether it would not.

        Stops early if other threads need the processor, which ``waits`` detects.
        """
        return waits.poll(self.socket.fileno(), nanoseconds)

    def wait(self, seconds: float | None, other: int | None = None) -> bool:
        """Wait until `receive` would not wait; return whether it would not.

        At most for a time, if one is given, and until another descriptor is readable. Raises
        ChannelClosed for a channel that this process has closed.
        """
        if self.socket.fileno() < 0:
            raise ChannelClosed
        looked = select.poll()
        looked.register(self.socket, select.POLLIN)
        if other is not None:
            looked.register(other, select.POLLIN)
        ready = looked.poll(None if seconds is None else seconds * 1000)
        return any(descriptor != other for descriptor, _ in ready)

    def close(self) -> None:
        """Close the socket; idempotent."""
        self.socket.close()


def spill(pieces: Sequence[bytes | memoryview]) -> tuple[bytes, int]:
    """Write a long message to a memfd; returns its notice and the descriptor, which the caller closes.

    Raises OSError if memory is short.
    """
    spilled = os.memfd_create("gpubridge-message", os.MFD_CLOEXEC)
    try:
        with open(spilled, "wb", 0, closefd=False) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
    except BaseException:
        os.close(spilled)
        raise
    return _SPILL.pack(_SPILL_KIND, sum(map(len, pieces))), spilled


def is_unread(message: bytes) -> bool:
    """Return whether a received message is only the notice of a long one, for `read_spilled`."""
    return message[0] == _SPILL_KIND


def read_spilled(notice: bytes, fds: list[int]) -> bytes:
    """Read the message in ``fds[0]``; removes and closes that descriptor.

    Raises MalformedMessage, having closed all ``fds``, if the message is too long or not as long as
    announced.
    """
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


def _receive(descriptor: int, scratch: bytearray) -> tuple[bytes, list[int], bool]:
    """Receive a message; as the compiled `receive_message`."""
    if descriptor < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=descriptor)
    try:
        count, ancillary, flags, _ = sock.recvmsg_into([scratch], _ANCILLARY, _RECEIVE_FLAGS)
    finally:
        sock.detach()
    return bytes(memoryview(scratch)[:count]), _descriptors(ancillary), bool(flags & _CUT)


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
