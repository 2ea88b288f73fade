"""gRPC messages in the data of a stream: each comes after five bytes, a flag and its length."""

from __future__ import annotations

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.grpc.status import CallFailed, Status
from gpubridge.frontend.http.message import decompress

__all__ = ["PREFIX", "MessageReader", "read_prefix"]

PREFIX = 5


def read_prefix(prefix: bytes | bytearray | memoryview, limit: int) -> tuple[bool, int]:
    """Return whether a message is compressed, and its length.

    Raises
    ------
    CallFailed
        RESOURCE_EXHAUSTED for one longer than ``limit``, INTERNAL for a flag that is none.
    """
    length = int.from_bytes(prefix[1:PREFIX], "big")
    if prefix[0] > 1:
        raise CallFailed(
            Status.INTERNAL,
            f"expected 0 or 1 as the flag before a message, got {prefix[0]}",
        )
    if length > limit:
        raise CallFailed(
            Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {limit})"
        )
    return prefix[0] == 1, length


class MessageReader:
    """Puts messages together from data as it comes.

    Parameters
    ----------
    limit : int
        Bytes of a message, after decompression too.
    coding : bytes
        What compressed messages are compressed with.
    """

    __slots__ = ("_coding", "_compressed", "_limit", "_missing", "_part")

    def __init__(self, limit: int, coding: bytes) -> None:
        self._limit = limit
        self._coding = coding
        self._part = bytearray()
        self._missing = -1
        self._compressed = False

    @property
    def empty(self) -> bool:
        """Whether no message has begun that is not complete."""
        return self._missing < 0 and not self._part

    def feed(self, data: memoryview) -> list[bytes]:
        """Take data; returns the messages that are complete with it.

        Raises
        ------
        CallFailed
            For a message that is too long, or not what its flag says.
        """
        messages: list[bytes] = []
        part = self._part
        while True:
            wanted = PREFIX - len(part) if self._missing < 0 else self._missing - len(part)
            taken = data[:wanted]
            part += taken
            data = data[len(taken) :]
            if len(taken) < wanted:
                return messages
            if self._missing < 0:
                self._compressed, self._missing = read_prefix(part, self._limit)
            else:
                messages.append(self._message(bytes(part)))
                self._missing = -1
            part = self._part = bytearray()

    def _message(self, message: bytes) -> bytes:
        if not self._compressed:
            return message
        try:
            return decompress(self._coding, message, self._limit)
        except BridgeError as error:
            status = Status.INTERNAL
            if error.code == ErrorCode.UNSUPPORTED:
                status = Status.UNIMPLEMENTED
            raise CallFailed(status, error.message) from error
