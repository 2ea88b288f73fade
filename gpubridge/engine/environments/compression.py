"""The bytes inside a packed file: which packing it is, and a reader that notices bombs."""

from __future__ import annotations

import gzip
import importlib
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from gpubridge.errors import BridgeError, ErrorCode

__all__ = ["MeteredReader", "unpacked_bytes"]

_MIB = 1024 * 1024
_UNSUSPICIOUS = 256 * _MIB
"""Less than this is no bomb, however well it was packed."""

_EXPECTED = "expected a tar archive, packed with gzip (.tar.gz), bzip2 or xz, or not at all"
_HEAD = 512
_TAR_MAGIC = 257
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
}


class MeteredReader:
    """Reads what a packed file holds, for as long as it is no bomb.

    Parameters
    ----------
    packed : BinaryIO
        The file; its position tells how much of it has been used.
    inner : BinaryIO
        Unpacks `packed`.
    ratio : int
        How many times as long as the packed bytes the unpacked ones may be.
    damage : type of Exception
        What `inner` raises, besides OSError, for bytes that are not what they should be.
    """

    def __init__(
        self,
        packed: BinaryIO,
        inner: BinaryIO,
        path: Path,
        ratio: int,
        damage: type[Exception],
    ) -> None:
        self._packed = packed
        self._inner = inner
        self._path = path
        self._ratio = ratio
        self._damage = damage
        self._read = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end.

        Raises
        ------
        BridgeError
            INVALID_ARG when the file is damaged, cut short, or a bomb.
        """
        try:
            data = self._inner.read(size)
        except EOFError as error:
            raise _refuse(f"environment {self._path} is cut short: {error}") from error
        except (OSError, self._damage) as error:
            raise _refuse(f"environment {self._path} is damaged: {error}") from error
        self._read += len(data)
        if self._read > _UNSUSPICIOUS and self._read > self._ratio * self._packed.tell():
            raise _refuse(
                f"environment {self._path} is refused: expected at most {self._ratio} bytes for each "
                f"packed one, got {self._read} bytes out of {self._packed.tell()}; pack it without "
                "what is not needed"
            )
        return data

    def drain(self) -> None:
        """Read what is left: the check sums come last."""
        while self.read(_MIB):
            pass


def unpacked_bytes(packed: BinaryIO, path: Path, ratio: int) -> MeteredReader:
    """Return a reader of what a file holds, by what its first bytes say that it is.

    Raises
    ------
    BridgeError
        INVALID_ARG when it is no archive; UNSUPPORTED when it is one of another kind.
    """
    head = packed.read(_HEAD)
    packed.seek(0)
    inner, damage = _open(packed, head, path)
    return MeteredReader(packed, inner, path, ratio, damage)


def _open(packed: BinaryIO, head: bytes, path: Path) -> tuple[BinaryIO, type[Exception]]:
    """Return what unpacks a file, and what it raises, besides OSError, when it finds damage."""
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=packed, mode="rb")), zlib.error
    try:
        # Not every Python was built with these.
        if head.startswith(b"BZh"):
            bz2 = importlib.import_module("bz2")
            return bz2.BZ2File(packed), ValueError
        if head.startswith(b"\xfd7zXZ\x00"):
            lzma = importlib.import_module("lzma")
            return lzma.LZMAFile(packed), lzma.LZMAError
    except ImportError as error:
        raise BridgeError(
            f"environment {path} cannot be unpacked by the server's Python: {error}; pack it with gzip",
            ErrorCode.UNSUPPORTED,
        ) from error
    if head[_TAR_MAGIC : _TAR_MAGIC + 5] == b"ustar":
        return packed, OSError
    for magic, kind in _FOREIGN.items():
        if head.startswith(magic):
            raise BridgeError(f"environment {path} is {kind}: {_EXPECTED}", ErrorCode.UNSUPPORTED)
    got = f"a file that begins with {head[:8]!r}" if head else "an empty file"
    raise _refuse(f"environment {path} is no archive: {_EXPECTED}, got {got}")


def _refuse(message: str) -> BridgeError:
    return BridgeError(message, ErrorCode.INVALID_ARG)
