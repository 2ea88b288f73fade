"""Calls found as a whole by the compiled module: the same comes of them as frame by frame."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gpubridge.frontend.http2 import frames, whole_calls
from gpubridge.frontend.http2.compression import encode_headers
from gpubridge.frontend.http2.faults import Http2ErrorCode
from gpubridge.frontend.http2.opening import HeaderReceiver
from gpubridge.tensor import native
from tests.unit.test_http2_peer import BLOCK, DONE, OK, REQUEST, Recorder, Server, data, headers

pytestmark = pytest.mark.skipif(native.native() is None, reason="no compiled module")

SIZED = encode_headers([*REQUEST, (b"content-length", b"5")])

REFUSED = 11
HELD = 13


def update(stream_id: int, increment: int) -> bytes:
    return frames.window_update_frame(stream_id, increment)


def call(stream_id: int, body: bytes = b"hello", block: bytes = BLOCK) -> bytes:
    return headers(stream_id, block=block) + update(stream_id, 5) + data(stream_id, body, end=True)


class Echo(Recorder):
    """Answers requests with their bodies, some before they have ended; resets those that say so."""

    server: Server

    def on_headers(self, stream_id, headers, end):
        super().on_headers(stream_id, headers, end)
        if stream_id == REFUSED:
            self.server.connection.send_headers(stream_id, DONE, end=True)
        elif stream_id == HELD:
            self.server.connection.hold(stream_id)

    def on_data(self, stream_id, view, end):
        super().on_data(stream_id, view, end)
        if end and self.bodies[stream_id] == b"reset":
            self.server.connection.reset(stream_id, 8)
        elif end:
            body = [self.bodies[stream_id]] if self.bodies[stream_id] else []
            self.server.connection.send_response(stream_id, OK, body, DONE)


def outcome(pieces: list[bytes], **limits):
    """Return what a server makes of reads: what it told its handler, what it sent, what is left."""
    echo = Echo()
    echo.server = server = Server(echo, **limits)
    server.feed(call(1) + call(3, block=SIZED))
    sent = [server.output()]
    for piece in pieces:
        server.feed(piece)
        sent.append(server.output())
    state = server.connection._state
    left = (state.highest_id, state.last_stream_id, sorted(state.streams), state.closed)
    windows = (server.connection._sender._window, server.connection._payload.window)
    budget = (state._idle._left, state._resets._left)
    return echo.events, echo.bodies, echo.ended, sent, left, windows, budget


def both(pieces: list[bytes], **limits):
    compiled = outcome(pieces, **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_calls, "native", lambda: None)
        assert outcome(pieces, **limits) == compiled
    return compiled


def test_known_calls_are_taken_as_a_whole(monkeypatch):
    taken = []
    known = HeaderReceiver.whole
    monkeypatch.setattr(
        HeaderReceiver, "whole", lambda self, *frame: taken.append(frame[0]) or known(self, *frame)
    )
    outcome([update(0, 9) + call(5) + update(0, 7) + call(7) + update(0, 1), call(9)])
    assert taken == [1, 3]


def test_several_calls_in_a_read():
    events, bodies, ended, *_, left, windows, _ = both(
        [update(0, 9) + call(5) + update(0, 7) + call(7, b"x") + update(0, 1)]
    )
    assert [event[1] for event in events] == [1, 3, 5, 7]
    assert bodies[7] == b"x"
    assert ended == {1, 3, 5, 7}
    assert left[2] == []
    assert windows[0] == 65535 + 9 + 7 + 1 - 5 - 5 - 5 - 1


def test_a_stream_gets_its_own_credit():
    small = frames.frame(frames.SETTINGS, 0, 0, b"\0\4\0\0\0\3")
    sent = both([small, call(5, b"12345678")])[3]
    assert sent[-1].endswith(DONE)
    assert not both([small, call(5, b"123456789")])[3][-1].endswith(DONE)


@pytest.mark.parametrize(
    "pieces",
    [
        [call(5) + call(5)],
        [call(7) + call(5)],
        [call(4)],
        [call(5, block=SIZED), call(7, b"four", block=SIZED)],
        [call(5)[:20], call(5)[20:]],
        [call(5) + call(7)[:-1], call(7)[-1:]],
        [headers(5) + call(7) + data(5, b"late", end=True)],
        [call(5) + update(0, 0)],
        [headers(5) + update(5, 0) + data(5, b"x", end=True)],
        [update(0, 0x7FFFFFFF) + call(5)],
        [headers(5) + update(5, 0x7FFFFFFF) + data(5, b"x", end=True)],
        [headers(5) + update(3, 1) + data(5, b"x", end=True)],
        [headers(5) + data(5, b"", end=True) + call(7)],
        [headers(5) + data(5, b"a") + data(5, b"b", end=True)],
        [headers(5, end=True) + call(7)],
        [call(5, b"reset") + call(7)],
        [call(5) + call(REFUSED) + call(HELD) + call(15)],
        [call(5) + frames.goaway_frame(0, 0, "") + call(7)],
    ],
)
def test_what_is_unusual_is_left_to_the_receiver(pieces):
    both(pieces)


def test_the_limits_hold():
    waiting = headers(5) + headers(7)
    assert ("reset", 9, Http2ErrorCode.REFUSED_STREAM) not in both([waiting + call(9)])[0]
    both([waiting + call(9)], max_concurrent_streams=2)
    both([update(0, 1) * 30 + call(5)], idle_frames=20, idle_frames_per_second=0)
    both([call(i) for i in range(5, 4005, 2)], connection_window=65535)
    both([call(5, bytes(20_000))] * 1, receive_bytes=1 << 16, stream_window=65535)


IDS = st.sampled_from([0, 1, 2, 5, 7, 9, 11, 13, 15])
FRAMES = st.one_of(
    st.builds(call, IDS, st.sampled_from([b"hello", b"reset", b"x" * 300])),
    st.builds(call, IDS, block=st.just(SIZED)),
    st.builds(update, IDS, st.sampled_from([0, 1, 5, 0x7FFFFFFF])),
    st.builds(lambda i, end: headers(i, end=end), IDS, st.booleans()),
    st.builds(
        lambda i, body, end: data(i, body, end=end), IDS, st.binary(max_size=4), st.booleans()
    ),
    st.builds(lambda i: frames.rst_stream_frame(i, 8), IDS),
    st.just(frames.frame(frames.PING, 0, 0, b"12345678")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(FRAMES, min_size=1, max_size=6).map(b"".join), max_size=5), st.data())
def test_any_frames(pieces, draw):
    if pieces and draw.draw(st.booleans()):
        cut = draw.draw(st.integers(0, len(pieces[-1])))
        pieces = [*pieces[:-1], pieces[-1][:cut], pieces[-1][cut:]]
    both([piece for piece in pieces if piece])
