"""Lines of a model's `Logger` between what it prints: pieces in the pipes of a stub's output.

The stub writes each line as a *record* into the pipe of its standard output, and then the record's *mark*, which
has no line, into that of its standard error. So what a thread wrote into either pipe before the line, or after it,
lies there on the right side of record and mark. Records without a line tell only that order.

A record is one or several pieces, each of which the kernel keeps together (PIPE_BUF), little-endian::

    u8 0, token        begins a piece; random for each stub, so that no text that a model prints looks like one
    u32 process, u32 number   the record
    u16 length, u8 more       bytes of its line that follow; 1 unless the piece is the record's last

The line is UTF-8: level, line number, file and text, with NUL between.
"""

from __future__ import annotations

import secrets
import select
import struct
from collections.abc import Iterator
from typing import NamedTuple

_PIECE = struct.Struct("<IIHB")
_TOKEN_BYTES = 8

Identifier = tuple[int, int]


class LogLine(NamedTuple):
    """A line that a model logs: ``level`` is a number of `pb_utils.Logger`."""

    level: int
    text: str
    file: str
    line: int


class Piece(NamedTuple):
    """A piece that was read: its record, its part of the line, and whether more of that follows.

    - ``end``: the place behind it.
    """

    record: Identifier
    data: bytes
    more: bool
    end: int


def new_token() -> str:
    """Return a token for a stub."""
    return secrets.token_hex(_TOKEN_BYTES)


def piece_start(token: str) -> bytes:
    """Return the bytes with which the pieces of a stub begin."""
    return b"\0" + token.encode()


def encode_line(line: LogLine) -> bytes:
    """Encode the line of a record."""
    text = f"{line.level}\0{line.line}\0{line.file}\0{line.text}"
    return text.encode(errors="backslashreplace")


def decode_line(data: bytes | bytearray) -> LogLine | None:
    """Decode the line of a record; None if it is none, as a model may write anything."""
    fields = data.decode(errors="backslashreplace").split("\0", 3)
    try:
        level, line, file, text = fields
        return LogLine(int(level), text, file, int(line))
    except ValueError:
        return None


def encode_pieces(start: bytes, record: Identifier, line: bytes = b"") -> Iterator[bytes]:
    """Yield the pieces of a record; a mark, or a record without a line, is one."""
    most = select.PIPE_BUF - len(start) - _PIECE.size
    for at in range(0, len(line) or 1, most):
        data = line[at : at + most]
        yield start + _PIECE.pack(*record, len(data), at + most < len(line)) + data


def read_piece(data: bytes, at: int) -> Piece | None:
    """Read the piece whose begin ends at a place; None if it is not whole yet."""
    begin = at + _PIECE.size
    if len(data) < begin:
        return None
    process, number, length, more = _PIECE.unpack_from(data, at)
    if len(data) < begin + length:
        return None
    return Piece((process, number), data[begin : begin + length], more != 0, begin + length)
