"""What a peer does wrong: of a stream (it is reset) or of the connection (it ends)."""

from __future__ import annotations

import enum

__all__ = ["ConnectionFault", "Http2ErrorCode", "StreamFault"]


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
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The connection cannot go on: it is answered with GOAWAY.

    Parameters
    ----------
    code : Http2ErrorCode
        What GOAWAY carries.
    text : str
        What was expected and what came; GOAWAY's debug data.
    """

    def __init__(self, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class StreamFault(Exception):
    """One stream cannot go on: it is answered with RST_STREAM.

    Parameters
    ----------
    stream_id : int
        Which.
    code : Http2ErrorCode
        What RST_STREAM carries.
    text : str
        What was expected and what came; for our own logs, since RST_STREAM carries no text.
    """

    def __init__(self, stream_id: int, code: Http2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code
        self.text = text
