"""Content codings gzip and deflate: compression, and decompression in pieces."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from gpubridge.errors import invalid, unsupported

_INPUT = 256 * 1024


class Inflater:
    """Decompresses one body in pieces; zlib works without the interpreter's lock.

    ``limit``: bytes of the decompressed body.

    Raises BridgeError: UNSUPPORTED for an unknown coding.
    """

    def __init__(
        self,
        coding: bytes,
        body: bytes | bytearray | memoryview,
        limit: int,
    ) -> None:
        coding = coding.strip().lower()
        if coding not in (b"gzip", b"deflate", b"identity"):
            raise unsupported("Unsupported compression type")
        self._coding = coding.decode()
        self._body = memoryview(body)
        self._at = 0
        self._limit = limit
        self._read = 0
        self._unpacker = None
        if coding != b"identity":
            self._unpacker = zlib.decompressobj(wbits=31 if coding == b"gzip" else 15)

    @property
    def finished(self) -> bool:
        """Return whether the whole body has been read."""
        if self._unpacker is None:
            return self._at >= len(self._body)
        return self._unpacker.eof

    def read(self, nbytes: int) -> bytes:
        """Return the next ``nbytes``, or what is left.

        Raises BridgeError: INVALID_ARG for data that is malformed or longer than the limit.
        """
        pieces: list[bytes] = []
        missing = nbytes
        try:
            while missing and not self.finished:
                pieces.append(self._next(missing))
                missing -= len(pieces[-1])
        except zlib.error as error:
            raise invalid(f"the request body is not {self._coding} data: {error}") from error
        self._read += nbytes - missing
        if self._read > self._limit:
            raise invalid(
                f"the decompressed request body is longer than the limit of {self._limit} bytes "
                "(--http-max-input-size)"
            )
        return b"".join(pieces)

    def _next(self, nbytes: int) -> bytes:
        unpacker = self._unpacker
        if unpacker is None:
            return bytes(self._input(nbytes))
        data = unpacker.unconsumed_tail or self._input(_INPUT)
        # Without input, zlib returns what it has buffered.
        piece = unpacker.decompress(data, nbytes)
        if not data and not piece and not unpacker.eof:
            raise invalid(f"the request body ends in the middle of its {self._coding} data")
        return piece

    def _input(self, nbytes: int) -> memoryview:
        data = self._body[self._at : self._at + nbytes]
        self._at += len(data)
        return data


def compress(coding: str, parts: Sequence[bytes | memoryview], level: int = -1) -> bytes:
    """Compress the parts as one body at zlib's ``level``."""
    packer = zlib.compressobj(level, wbits=31 if coding == "gzip" else 15)
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])
