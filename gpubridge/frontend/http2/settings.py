"""SETTINGS frames: what we announce, and what the peer announces (RFC 9113, section 6.5)."""

from __future__ import annotations

import struct

from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode
from gpubridge.frontend.http2.flow import DEFAULT_WINDOW, MAX_WINDOW
from gpubridge.frontend.http2.frames import SETTINGS, frame, window_update_frame
from gpubridge.frontend.http2.limits import Http2Limits

__all__ = ["PeerSettings", "announcement"]

HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

_SETTING = struct.Struct(">HI")
_DEFAULT_FRAME_SIZE = 1 << 14
# Value range of a setting, its name, and the error code for anything else.
_RANGES = {
    ENABLE_PUSH: (0, 1, "ENABLE_PUSH", Http2ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW_SIZE: (
        0,
        MAX_WINDOW,
        "INITIAL_WINDOW_SIZE",
        Http2ErrorCode.FLOW_CONTROL_ERROR,
    ),
    MAX_FRAME_SIZE: (
        _DEFAULT_FRAME_SIZE,
        (1 << 24) - 1,
        "MAX_FRAME_SIZE",
        Http2ErrorCode.PROTOCOL_ERROR,
    ),
}


class PeerSettings:
    """What the peer has told us of itself."""

    def __init__(self) -> None:
        self.initial_window = DEFAULT_WINDOW
        self.max_frame_size = _DEFAULT_FRAME_SIZE

    def update(self, payload: bytes) -> int:
        """Take the payload of a SETTINGS frame, in its order; the last of a setting counts.

        Returns
        -------
        int
            The smallest header table that it allows; 2^32 if it says nothing of that.

        Raises
        ------
        ConnectionFault
            A length that is no multiple of six, or a value outside of its range.
        """
        if len(payload) % _SETTING.size:
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR,
                f"SETTINGS: expected a multiple of 6 bytes, got {len(payload)}",
            )
        smallest_table = 1 << 32
        for setting, value in _SETTING.iter_unpack(payload):
            if setting in _RANGES:
                least, most, name, code = _RANGES[setting]
                if not least <= value <= most:
                    raise ConnectionFault(
                        code, f"SETTINGS: {name}: expected {least} to {most}, got {value}"
                    )
            if setting == INITIAL_WINDOW_SIZE:
                self.initial_window = value
            elif setting == MAX_FRAME_SIZE:
                self.max_frame_size = value
            elif setting == HEADER_TABLE_SIZE:
                smallest_table = min(smallest_table, value)
        return smallest_table


def announcement(limits: Http2Limits) -> bytes:
    """Return our own first bytes: SETTINGS, and the connection's window."""
    told = {
        MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
        INITIAL_WINDOW_SIZE: limits.stream_window,
        MAX_FRAME_SIZE: limits.max_frame_size,
        MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
    }
    first = frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*item) for item in told.items()))
    if limits.connection_window > DEFAULT_WINDOW:
        # Only WINDOW_UPDATE changes the connection's window, never a setting.
        first += window_update_frame(0, limits.connection_window - DEFAULT_WINDOW)
    return first
