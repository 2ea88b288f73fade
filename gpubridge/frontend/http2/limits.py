"""How much one connection may ask of us."""

from __future__ import annotations

import dataclasses

from gpubridge.frontend.http2.flow import DEFAULT_WINDOW, MAX_WINDOW

__all__ = ["Http2Limits"]

_SMALLEST_FRAME_LIMIT = 1 << 14
_LARGEST_FRAME_LIMIT = (1 << 24) - 1


@dataclasses.dataclass(frozen=True)
class Http2Limits:
    """The limits of one connection; the first five are told to the peer.

    Parameters
    ----------
    max_concurrent_streams : int
        Streams open at once; further ones get REFUSED_STREAM.
    max_frame_size : int
        The largest payload of a frame, 2^14 to 2^24-1. Large, so that a large message needs few
        frames and can be received straight into its place.
    stream_window, connection_window : int
        Bytes of DATA a peer may send ahead, 65,535 to 2^31-1. The stream's is what a stream whose
        consumer holds may bring before it is stopped.
    header_list_bytes : int
        Size of a decoded header list (names, values and 32 bytes per field). A larger one costs
        the stream, one of four times the size the connection.
    header_block_bytes : int
        Bytes of a compressed header block with all its CONTINUATION frames.
    continuation_frames : int
        CONTINUATION frames of one header block.
    receive_bytes : int
        Size of the buffer that everything but the payload of `receive_into` is received in.
    output_bytes : int
        About how many bytes of queued DATA one `take_output` hands out.
    quantum_bytes : int
        The most DATA that a stream gets in its turn while others wait.
    unsent_control_frames : int
        Answers (acknowledgements, resets) that may wait for a peer who does not read.
    resets, resets_per_second : int
        Streams that the peer may cancel or make us reset: at once, and regained per second. Each
        completed stream allows one more.
    idle_frames, idle_frames_per_second : int
        Frames that bring nothing forward (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA,
        unknown types): at once, and regained per second. Each stream completed and each DATA
        frame sent allows four more.
    reset_memory : int
        Streams reset by us whose late frames are still forgiven.
    reset_grace_seconds : float
        For how long they are.

    Raises
    ------
    ValueError
        A limit is outside of what the protocol allows.
    """

    max_concurrent_streams: int = 256
    max_frame_size: int = 1 << 22
    stream_window: int = 1 << 20
    connection_window: int = 1 << 26
    header_list_bytes: int = 1 << 14
    header_block_bytes: int = 1 << 14
    continuation_frames: int = 16
    receive_bytes: int = 3 << 13
    output_bytes: int = 1 << 20
    quantum_bytes: int = 1 << 17
    unsent_control_frames: int = 4000
    resets: int = 500
    resets_per_second: int = 100
    idle_frames: int = 20_000
    idle_frames_per_second: int = 2_000
    reset_memory: int = 1000
    reset_grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what the protocol does not allow."""
        ranges = {
            "max_concurrent_streams": (1, MAX_WINDOW),
            "max_frame_size": (_SMALLEST_FRAME_LIMIT, _LARGEST_FRAME_LIMIT),
            # A smaller one could not be held against a peer that has not read our settings yet.
            "stream_window": (DEFAULT_WINDOW, MAX_WINDOW),
            "connection_window": (DEFAULT_WINDOW, MAX_WINDOW),
            "receive_bytes": (self.header_block_bytes + 1024, 1 << 30),
            "quantum_bytes": (1, MAX_WINDOW),
            "output_bytes": (1, MAX_WINDOW),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
