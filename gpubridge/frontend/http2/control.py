"""SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, GOAWAY, PRIORITY and PUSH_PROMISE."""

from __future__ import annotations

from collections.abc import Callable

from gpubridge.frontend.http2.faults import ConnectionFault, Http2ErrorCode, StreamFault
from gpubridge.frontend.http2.frames import (
    ACK,
    GOAWAY,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameType,
    frame,
)
from gpubridge.frontend.http2.sending import Sender
from gpubridge.frontend.http2.state import ConnectionState

__all__ = ["ControlFrames"]

_GOAWAY_BYTES = 8
_OF_THE_CONNECTION = frozenset((SETTINGS, PING, GOAWAY))
_OF_A_STREAM = frozenset((PRIORITY, RST_STREAM, PUSH_PROMISE))
_SETTINGS_ACK = frame(SETTINGS, ACK, 0)


class ControlFrames:
    """Takes the frames that carry no part of a request.

    Parameters
    ----------
    state : ConnectionState
        What they change.
    sender : Sender
        Sends the answers.
    on_pong : callable
        Takes the payload of a PING's answer.
    """

    def __init__(
        self, state: ConnectionState, sender: Sender, on_pong: Callable[[bytes], None]
    ) -> None:
        self._state = state
        self._sender = sender
        self._on_pong = on_pong
        self._takers = {
            PRIORITY: self._priority,
            RST_STREAM: self._rst_stream,
            SETTINGS: self._settings,
            PUSH_PROMISE: self._push_promise,
            PING: self._ping,
            GOAWAY: self._goaway,
            WINDOW_UPDATE: self._window_update,
        }

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Take a frame whose size has been checked where it is fixed.

        Raises
        ------
        ConnectionFault, StreamFault
            What is wrong with it.
        """
        if kind in (_OF_THE_CONNECTION if stream_id else _OF_A_STREAM):
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"{FrameType(kind).name}: expected {'no' if stream_id else 'a'} stream, got "
                f"{stream_id}",
            )
        self._takers[kind](flags, stream_id, payload)

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._state.spend_idle_frame()
        if flags & ACK:
            if payload:
                raise ConnectionFault(
                    Http2ErrorCode.FRAME_SIZE_ERROR,
                    f"SETTINGS: expected an empty acknowledgement, got {len(payload)} bytes",
                )
            return
        peer = self._state.peer
        window = peer.initial_window
        smallest_table = peer.update(payload)
        if peer.initial_window != window:
            self._sender.change_initial_window(peer.initial_window - window)
        self._sender.limit_table(smallest_table)
        self._sender.answer(_SETTINGS_ACK)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._state.spend_idle_frame()
        if flags & ACK:
            self._on_pong(payload)
        else:
            self._sender.answer(frame(PING, ACK, 0, payload))
            self._state.handler.on_ping()

    def _rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        state = self._state
        self._check_not_idle(RST_STREAM, stream_id)
        stream = state.streams.get(stream_id)
        if stream is None:
            state.spend_idle_frame()
            return
        state.spend_reset()
        self._sender.forget(stream)
        state.handler.on_reset(stream_id, int.from_bytes(payload, "big"))

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        state = self._state
        state.spend_idle_frame()
        increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if not stream_id:
            if not increment:
                raise ConnectionFault(
                    Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE: expected at least 1, got 0"
                )
            self._sender.widen(increment)
            return
        self._check_not_idle(WINDOW_UPDATE, stream_id)
        stream = state.streams.get(stream_id)
        if stream is None:
            return
        if not increment:
            raise StreamFault(
                stream_id,
                Http2ErrorCode.PROTOCOL_ERROR,
                "WINDOW_UPDATE: expected at least 1, got 0",
            )
        self._sender.widen_stream(stream, increment)

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        # The peer opens no more streams, and will close when it has what it asked for.
        self._state.spend_idle_frame()
        if len(payload) < _GOAWAY_BYTES:
            raise ConnectionFault(
                Http2ErrorCode.FRAME_SIZE_ERROR,
                f"GOAWAY: expected at least 8 bytes, got {len(payload)}",
            )

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        # Deprecated by RFC 9113, which leaves it to us: ignored.
        self._state.spend_idle_frame()

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(
            Http2ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE: expected none from a client"
        )

    def _check_not_idle(self, kind: int, stream_id: int) -> None:
        if not stream_id & 1 or stream_id > self._state.highest_id:
            raise ConnectionFault(
                Http2ErrorCode.PROTOCOL_ERROR,
                f"{FrameType(kind).name}: expected a stream that was opened, got {stream_id}",
            )
