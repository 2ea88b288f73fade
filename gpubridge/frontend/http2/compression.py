"""Header compression (RFC 7541): hpack decodes, and what it decoded before is looked up.

A client's requests soon have header blocks of nothing but indexes, the same bytes each time. Such a
block means the same for as long as the dynamic table is the same; so blocks are remembered until
one changes the table. What we send uses the static table only: a block of ours has no state, and
can be made once and sent on any connection.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.headers import (
    Fields,
    MalformedHeaders,
    RequestHeaders,
    check_trailers,
)
from gpubridge.frontend.http2.limits import Http2Limits

__all__ = ["EMPTY_TABLE", "HeaderDecoder", "encode_headers"]

# A dynamic table size update to nothing: the peer allows less than the default that we never used.
EMPTY_TABLE = b"\x20"

_FIELD_OVERHEAD = 32
# A list larger than what we announced costs the stream, one this many times larger the connection.
_HARD_LIMIT_FACTOR = 4
_KNOWN_BLOCKS = 256
_KNOWN_BLOCK_BYTES = 1024


class HeaderDecoder:
    """Decodes the header blocks of one connection, in the order in which they come.

    Parameters
    ----------
    limits : Http2Limits
        How large a header list may be.
    """

    def __init__(self, limits: Http2Limits) -> None:
        self._limit = limits.header_list_bytes
        self._decoder = Decoder(max_header_list_size=self._limit * _HARD_LIMIT_FACTOR)
        #: What blocks mean while the dynamic table stays as it is. Only valid requests are here.
        self.known: dict[bytes, RequestHeaders] = {}

    def request(self, stream_id: int, block: bytes) -> RequestHeaders:
        """Return what a block says that begins a request.

        Raises
        ------
        ConnectionFault
            The block cannot be decoded; the table's state is lost.
        StreamFault
            The header list is too large or malformed.
        """
        fields, repeats = self._decode(stream_id, block)
        try:
            headers = RequestHeaders(fields)
        except MalformedHeaders as error:
            raise _malformed(stream_id, error) from None
        if repeats and len(block) <= _KNOWN_BLOCK_BYTES:
            if len(self.known) >= _KNOWN_BLOCKS:
                self.known.clear()
            self.known[block] = headers
        return headers

    def trailers(self, stream_id: int, block: bytes) -> Fields:
        """Return what a block says that ends a request; raises what `request` does."""
        fields, _ = self._decode(stream_id, block)
        try:
            check_trailers(fields)
        except MalformedHeaders as error:
            raise _malformed(stream_id, error) from None
        return fields

    def skip(self, block: bytes) -> None:
        """Decode a block whose meaning nobody wants, for the sake of the table."""
        if block not in self.known:
            try:
                self._decode(0, block)
            except StreamFault:
                pass  # it belongs to no stream

    def _decode(self, stream_id: int, block: bytes) -> tuple[Fields, bool]:
        """Return the fields of a block, and whether it left the table as it was."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        # Each addition puts a new object first; without one, entries can only become fewer.
        before = (len(entries), table.maxsize)
        first = entries[0] if entries else None
        try:
            decoded = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"header list: expected at most {self._limit} bytes, "
                f"got more than {self._limit * _HARD_LIMIT_FACTOR}",
            ) from None
        except HPACKError as error:
            raise ConnectionFault(
                Http2ErrorCode.COMPRESSION_ERROR, f"header block: {error}"[:200]
            ) from None
        now = entries[0] if entries else None
        same = now is first and (len(entries), table.maxsize) == before
        if not same:
            self.known.clear()
        fields = tuple((bytes(field[0]), bytes(field[1])) for field in decoded)
        size = sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields)
        if size > self._limit:
            raise StreamFault(
                stream_id,
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"header list: expected at most {self._limit} bytes, got {size}",
            )
        return fields, same


def encode_headers(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a header block that needs no dynamic table: the same bytes on every connection.

    Parameters
    ----------
    fields : iterable of (bytes, bytes)
        Names in lower case, pseudo-header fields first; checked by nobody.
    """
    parts: list[bytes] = []
    for name, value in fields:
        index, values = HeaderTable.STATIC_TABLE_MAPPING.get(name, (0, {}))
        if value in values:
            parts.append(_integer(values[value], 7, 0x80))
            continue
        parts.append(_integer(index, 4, 0))
        if not index:
            parts += (_integer(len(name), 7, 0), name)
        parts += (_integer(len(value), 7, 0), value)
    return b"".join(parts)


def _integer(value: int, prefix_bits: int, pattern: int) -> bytes:
    """Encode an integer after the bits of a pattern (RFC 7541, section 5.1)."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((pattern | value,))
    encoded = bytearray((pattern | most,))
    value -= most
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _malformed(stream_id: int, error: MalformedHeaders) -> StreamFault:
    return StreamFault(stream_id, Http2ErrorCode.PROTOCOL_ERROR, f"headers: {error}")
