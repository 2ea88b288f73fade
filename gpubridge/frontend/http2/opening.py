"""HEADERS and CONTINUATION: streams begin, and requests end with trailers."""

from __future__ import annotations

from gpubridge.frontend.http2.compression import HeaderDecoder
from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.frames import END_HEADERS, END_STREAM, PADDED, PRIORITY_FIELDS
from gpubridge.frontend.http2.headers import RequestHeaders
from gpubridge.frontend.http2.state import ConnectionState
from gpubridge.frontend.http2.streams import Stream

__all__ = ["HeaderReceiver"]

_PRIORITY_BYTES = 5


class HeaderReceiver:
    """Takes header blocks, in one frame or several.

    Parameters
    ----------
    state : ConnectionState
        Where streams are opened.
    """

    def __init__(self, state: ConnectionState) -> None:
        self._state = state
        self._streams = state.streams
        self._limits = state.limits
        self._decoder = HeaderDecoder(state.limits)
        #: What header blocks mean that are known.
        self.known = self._decoder.known
        self._on_headers = state.handler.on_headers
        #: The stream whose header block is not complete, else 0.
        self.unfinished = 0
        self._flags = 0
        self._block = b""
        self._frames = 0

    def begin(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a HEADERS frame of any form."""
        payload = _without_padding(flags, payload)
        if flags & PRIORITY_FIELDS:
            if len(payload) < _PRIORITY_BYTES:
                raise ConnectionFault(
                    Http2ErrorCode.FRAME_SIZE_ERROR,
                    f"HEADERS: expected 5 bytes of priority, got {len(payload)}",
                )
            payload = payload[_PRIORITY_BYTES:]
        if not stream_id:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR, "HEADERS: expected a stream, got the connection"
            )
        if flags & END_HEADERS:
            self.whole(stream_id, flags, payload)
            return
        self.unfinished = stream_id
        self._flags = flags
        self._block = payload
        self._frames = 0

    def proceed(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a CONTINUATION frame."""
        if not self.unfinished:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                "CONTINUATION: expected only after HEADERS without END_HEADERS",
            )
        self._frames += 1
        self._block += payload
        if self._frames > self._limits.continuation_frames:
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"header block: expected at most {self._limits.continuation_frames} CONTINUATION "
                "frames, got more",
            )
        if len(self._block) > self._limits.header_block_bytes:
            raise ConnectionFault(
                Http2ErrorCode.ENHANCE_YOUR_CALM,
                f"header block: expected at most {self._limits.header_block_bytes} bytes, got "
                f"{len(self._block)} or more",
            )
        if flags & END_HEADERS:
            block = self._block
            self._block = b""
            self.unfinished = 0
            self.whole(stream_id, self._flags, block)

    def whole(self, stream_id: int, flags: int, block: bytes) -> None:
        """Take a complete header block: of a new stream, or of an open one's trailers.

        Raises
        ------
        ConnectionFault, StreamFault
            What is wrong with it.
        """
        state = self._state
        if stream_id <= state.highest_id or not stream_id & 1:
            self._known_stream(stream_id, flags, block)
            return
        state.highest_id = stream_id
        if state.refusing or len(self._streams) >= self._limits.max_concurrent_streams:
            self._decoder.skip(block)
            raise StreamFault(
                stream_id,
                Http2ErrorCode.REFUSED_STREAM,
                f"expected at most {self._limits.max_concurrent_streams} open streams, or none any "
                "more, got another",
            )
        headers = self._decoder.known.get(block)
        if headers is None:
            headers = self._decoder.request(stream_id, block)
        end = flags & END_STREAM == END_STREAM
        stream = Stream(stream_id, self._limits.stream_window, state.peer.initial_window)
        if headers.content_length is not None:
            _expect_length(stream, headers, end)
        if end:
            stream.ended = True
            stream.plain = False
        self._streams[stream_id] = stream
        state.last_stream_id = stream_id
        self._on_headers(stream_id, headers, end)

    def _known_stream(self, stream_id: int, flags: int, block: bytes) -> None:
        """Take a header block of a stream that is not new."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._trailers(stream, flags, block)
        elif stream_id in self._state.forgiven:
            self._decoder.skip(block)
        elif stream_id & 1:
            raise ConnectionFault(
                Http2ErrorCode.STREAM_CLOSED,
                f"HEADERS: expected a stream above {self._state.highest_id}, got {stream_id}, "
                "which is closed",
            )
        else:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"HEADERS: expected an odd stream id, got {stream_id}",
            )

    def _trailers(self, stream: Stream, flags: int, block: bytes) -> None:
        """Take the trailers of an open stream."""
        stream_id = stream.stream_id
        if stream.ended or not flags & END_STREAM:
            self._decoder.skip(block)
            if stream.ended:
                raise StreamFault(
                    stream_id, Http2ErrorCode.STREAM_CLOSED, "HEADERS: expected none after the end"
                )
            raise StreamFault(
                stream_id, Http2ErrorCode.PROTOCOL_ERROR, "trailers: expected END_STREAM"
            )
        fields = self._decoder.trailers(stream_id, block)
        if stream.expected:
            raise StreamFault(
                stream_id,
                Http2ErrorCode.PROTOCOL_ERROR,
                f"content-length: expected {stream.expected} more bytes, got trailers",
            )
        stream.ended = True
        stream.plain = False
        stream.target = None
        self._state.handler.on_trailers(stream_id, fields)


def _expect_length(stream: Stream, headers: RequestHeaders, end: bool) -> None:
    """Hold a stream to its content-length."""
    if end and headers.content_length:
        raise StreamFault(
            stream.stream_id,
            Http2ErrorCode.PROTOCOL_ERROR,
            f"content-length: expected {headers.content_length} bytes, got no body",
        )
    stream.expected = headers.content_length
    stream.plain = False


def _without_padding(flags: int, payload: bytes) -> bytes:
    """Take the padding off a HEADERS frame."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(
            Http2ErrorCode.FRAME_SIZE_ERROR, "HEADERS: expected the length of its padding"
        )
    end = len(payload) - payload[0]
    if end < 1:
        raise ConnectionFault(
            Http2ErrorCode.PROTOCOL_ERROR,
            f"HEADERS: expected padding within its {len(payload)} bytes, got {payload[0]}",
        )
    return payload[1:end]
