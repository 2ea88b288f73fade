"""Frames of HTTP/2 as tests send them: types, flags, error codes, and header blocks without a table.

::

    0        3      4       5             9             9 + length
    | length | type | flags | stream id   | payload ... |
       24 bit  8 bit  8 bit   1 + 31 bit
"""

import enum
import struct

from hpack import Encoder

__all__ = [
    "HEADER_BYTES",
    "MAX_STREAM_ID",
    "PREFACE",
    "Http2ErrorCode",
    "encode_headers",
    "frame",
    "goaway_frame",
    "pack_header",
    "rst_stream_frame",
    "unpack_header",
    "window_update_frame",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_STREAM_ID = 0x7FFFFFFF


class Http2ErrorCode(enum.IntEnum):
    """The error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11


DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

END_STREAM = 0x01

# Length and type are one word: length << 8 | type.
_HEADER = struct.Struct(">IBI")
_RST_STREAM = struct.Struct(">IBII")
_GOAWAY = struct.Struct(">II")
pack_header = _HEADER.pack
unpack_header = _HEADER.unpack_from


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return pack_header(len(payload) << 8 | kind, flags, stream_id) + payload


def rst_stream_frame(stream_id: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return _RST_STREAM.pack(4 << 8 | RST_STREAM, 0, stream_id, code)


def window_update_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return _RST_STREAM.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def goaway_frame(last_stream_id: int, code: int, text: str) -> bytes:
    """Return a GOAWAY frame whose debug data is ``text``."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream_id, code) + text.encode()[:1024])


def encode_headers(fields) -> bytes:
    """Return a header block of literals: the same bytes mean the same on every connection."""
    encoder = Encoder()
    # hpack adds to its table what is not sensitive: then no two blocks would be the same.
    return encoder.encode([(name, value, True) for name, value in fields], huffman=False)
