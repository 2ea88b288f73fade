"""The h2 library as the client: whatever it does, both sides have seen the same."""

import contextlib
from collections import Counter
from itertools import product, repeat

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from hypothesis import assume, given, settings as test_settings, strategies as st

from tests.unit import http2_frames as frames
from tests.unit.http2_frames import Http2ErrorCode
from tests.unit.test_http2_peer import DONE, OK, REQUEST, Server, data, headers, split

FIELDS = [(name.decode(), value.decode()) for name, value in REQUEST]
SAME = test_settings(derandomize=True)


def whole_frames(output):
    return [frames.frame(*frame) for frame in split(output)]


class Exchange:
    """An h2 client and our connection, with bytes carried between them on demand."""

    def __init__(self, **limits):
        self.server = Server(started=False, **limits)
        self.client = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=None)
        )
        self.client.initiate_connection()
        self.sent, self.answered = {}, {}
        self.got, self.got_ended, self.got_trailers = {}, set(), set()
        self.resets = set()
        self.finished = set()
        self.acknowledging = True
        self.started = set()

    def carry(self, chunk=1 << 30):
        """Carry bytes both ways until neither side has any."""
        for _ in range(1000):
            up = self.client.data_to_send()
            self.server.feed(up, chunk)
            down = self.server.output()
            # One by one: h2 takes up a new MAX_FRAME_SIZE only between two calls.
            for whole in whole_frames(down):
                for event in self.client.receive_data(whole):
                    self.seen(event)
            if not up and not down:
                return
        raise AssertionError("they never come to rest")

    def seen(self, event):
        if isinstance(event, h2.events.DataReceived):
            self.got[event.stream_id] += event.data
            if self.acknowledging:
                self.acknowledge(event.stream_id, event.flow_controlled_length)
        elif isinstance(event, h2.events.StreamEnded):
            self.got_ended.add(event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self.got_trailers.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset) and event.error_code:
            self.resets.add(event.stream_id)
        assert not isinstance(event, h2.events.ConnectionTerminated), event

    def acknowledge(self, stream_id, size):
        if size:
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                self.client.acknowledge_received_data(size, stream_id)

    # -- what may happen ------------------------------------------------------------------------

    def request(self):
        stream_id = self.client.get_next_available_stream_id()
        if self.client.open_outbound_streams < 20:
            self.client.send_headers(stream_id, FIELDS)
            self.sent[stream_id] = b""
            self.answered[stream_id] = b""
            self.got[stream_id] = b""

    def open_streams(self):
        return [s for s in self.sent if s not in self.finished]

    def send(self, stream_id, payload, padding, end):
        if stream_id in self.server.recorder.ended:
            return
        room = self.client.local_flow_control_window(stream_id)
        room = min(room, self.client.max_outbound_frame_size) - (padding or 0) - 1
        payload = payload[: max(room, 0)]
        self.client.send_data(stream_id, payload, end_stream=end, pad_length=padding)
        self.sent[stream_id] += payload
        self.carry()

    def answer(self, stream_id, payload, end):
        connection = self.server.connection
        if not self.answered[stream_id] and stream_id not in self.started:
            connection.send_headers(stream_id, OK)
            self.started.add(stream_id)
        half = memoryview(payload)[: len(payload) // 2]
        connection.send_data(stream_id, [half, payload[len(payload) // 2 :]])
        self.answered[stream_id] += payload
        if end:
            connection.send_headers(stream_id, DONE, end=True)
            self.finished.add(stream_id)

    def cancel(self, stream_id):
        self.client.reset_stream(stream_id, Http2ErrorCode.CANCEL)
        self.finished.add(stream_id)
        self.resets.add(stream_id)

    def settled(self):
        """Open every window wide, and carry all there is."""
        self.acknowledging = True
        self.client.update_settings({4: 1 << 24})
        self.client.increment_flow_control_window(1 << 24)
        self.carry()
        self.carry()

    def check(self):
        """Compare what either side has sent with what the other has seen."""
        recorder = self.server.recorder
        assert recorder.fault is None
        for stream_id, sent in self.sent.items():
            if stream_id in self.resets:
                assert sent.startswith(recorder.bodies[stream_id])
                assert self.answered[stream_id].startswith(self.got[stream_id])
            else:
                assert recorder.bodies[stream_id] == sent
                assert self.got[stream_id] == self.answered[stream_id]
                assert (stream_id in self.got_trailers) == (stream_id in self.finished)
            assert self.server.connection.queued(stream_id) == 0


def act_on_the_connection(exchange, action, draw):
    if action == "ping":
        exchange.client.ping(b"pingpong")
    elif action == "window":
        exchange.client.update_settings({4: draw(st.sampled_from([0, 1000, 65535, 1 << 20]))})
    elif action == "frame":
        exchange.client.update_settings({5: draw(st.sampled_from([16384, 20000, 1 << 20]))})
    elif action == "hold":
        exchange.acknowledging = not exchange.acknowledging
    elif action == "request":
        exchange.request()


def act_on_a_stream(exchange, stream_id, action, draw):
    size = draw(st.sampled_from([0, 1, 100, 5000, 16385, 70_000]))
    if action == "cancel":
        exchange.cancel(stream_id)
    elif action == "send":
        padding = draw(st.sampled_from([None, 0, 20]))
        exchange.send(stream_id, b"u" * size, padding, draw(st.booleans()))
    else:
        body = bytes([draw(st.integers(0, 255))]) * size
        exchange.answer(stream_id, body, draw(st.booleans()))


ON_THE_CONNECTION = ["request", "window", "frame", "ping", "hold", "carry"]
ON_A_STREAM = ["send", "answer", "cancel"]


@SAME
@given(st.data())
def test_both_sides_see_the_same(draws):
    draw = draws.draw
    exchange = Exchange()
    exchange.carry()
    chunk = draw(st.sampled_from([1 << 30, 1000, 7]), "chunk")
    exchange.request()
    exchange.carry(chunk)
    actions = st.sampled_from(ON_THE_CONNECTION + ON_A_STREAM)
    for action in draw(st.lists(actions, min_size=5, max_size=40), "actions"):
        streams = exchange.open_streams()
        if action in ON_THE_CONNECTION:
            act_on_the_connection(exchange, action, draw)
        elif streams:
            act_on_a_stream(exchange, draw(st.sampled_from(streams)), action, draw)
        if action in ("carry", "request"):
            exchange.carry(chunk)
    exchange.settled()
    exchange.check()


LEGAL = st.sampled_from(
    [
        headers(1),
        headers(3, end=True),
        headers(5),
        data(1, b"x" * 10),
        data(1, b"", end=True),
        data(5, b"y" * 100, end=True),
        frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.frame(frames.SETTINGS, 0, 0, b"\0\4\0\0\1\0"),
        frames.frame(frames.SETTINGS, 1, 0),
        frames.frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1"),
        frames.rst_stream_frame(1, 8),
        frames.rst_stream_frame(5, 8),
        frames.window_update_frame(0, 100),
        frames.window_update_frame(1, 100),
        frames.goaway_frame(0, 0, "bye"),
        frames.frame(frames.CONTINUATION, 4, 1, b""),
        frames.frame(frames.HEADERS, 0, 7, b""),
        frames.frame(frames.CONTINUATION, 4, 7, b""),
        frames.frame(frames.DATA, 8, 1, b"\5abcdefgh"),
        frames.frame(frames.HEADERS, 0x2C, 9, b"\2\0\0\0\0\1" + headers(9)[9:] + b"\0\0"),
        frames.frame(200, 0xFF, 1, b"unknown"),
        frames.frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"),
    ]
)


@SAME
@given(st.lists(LEGAL, max_size=12))
def test_frames_that_h2_refuses_are_refused(sequence):
    """Ours ends the connection, or resets the stream, exactly where h2 as a server does."""
    theirs = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    theirs.initiate_connection()
    theirs.receive_data(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
    ours = Server()
    for whole in sequence:
        lenient = whole[3] in (frames.GOAWAY, frames.RST_STREAM) or (
            whole[3] == frames.SETTINGS and whole[4] & 1
        )
        if lenient:
            continue  # h2 goes by an older reading of these
        theirs.data_to_send()
        refused = False
        try:
            theirs.receive_data(whole)
        except h2.exceptions.ProtocolError:
            refused = True
        reset = any(f[0] == frames.RST_STREAM for f in split(theirs.data_to_send()))
        ours.feed(whole)
        answers = ours.frames()
        complained = ours.connection.closed or any(f[0] == frames.RST_STREAM for f in answers)
        if refused or reset:
            assert complained, whole
            return
        if complained:
            assert whole[3] in (frames.HEADERS, frames.CONTINUATION), (whole, ours.recorder.events)
            return


# -- requests that break rules of RFC 9113, section 8

WELL_FORMED = [*REQUEST, (b"x", b"y")]
FIELDS_OF_BOTH = [
    *REQUEST,
    *((b":method", method) for method in (b"CONNECT", b"GET", b"")),
    *((name, b"") for name in (b":path", b":authority", b"x", b"host", b"te", b"content-length")),
    (b":path", b"/ "), (b":authority", b"there"), (b":scheme", b"a\rb"),
    (b":status", b"200"), (b":protocol", b"websocket"), (b":other", b"y"), (b":", b"y"), (b"", b"y"),
    (b"Upper", b"y"), (b"a b", b"y"), (b"a:b", b"y"), (b"\x7f", b"y"), (b"a\0", b"y"), (b"\xe9", b"y"),
    *((b"x", value) for value in (b"a\0b", b"a\nb", b"a\r", b" a", b"a\t", b"a b", b"\xff", b"\x7f")),
    *((name, b"y") for name in (b"connection", b"proxy-connection", b"keep-alive", b"upgrade")),
    (b"transfer-encoding", b"chunked"), (b"te", b"trailers"), (b"te", b"Trailers"),
    (b"te", b"trailers, gzip"), (b"te", b"gzip"), (b"host", b"here"), (b"host", b"there"),
    *((b"content-length", value) for value in (b"0", b"3", b"4", b"-3", b"+3", b"3, 3", b"0x3", b" 3")),
    (b"expect", b"100-continue"),
]  # fmt: skip


def changed(fields, changes):
    """Return a list of fields with some put in, left out or moved."""
    fields = list(fields)
    for kind, place, field in changes:
        at = place % (len(fields) + 1)
        if kind == "put":
            fields.insert(at, field)
        elif at < len(fields):
            moved = fields.pop(at)
            if kind == "move":
                fields.append(moved)
    return fields


PLACES = range(7)
CHANGE = st.tuples(
    st.sampled_from(["put", "put", "leave out", "move"]),
    st.sampled_from(PLACES),
    st.sampled_from(FIELDS_OF_BOTH),
)
TRAILER = (b"x", b"y")
TRAILERS = st.none() | st.lists(CHANGE, max_size=2).map(lambda some: changed([TRAILER], some))


def sent(fields, pieces, trailers, *, ends, split_at):
    """Return the frames of a request; with ``ends`` false, its last one does not say that it is."""
    block, bodies = frames.encode_headers(fields), [data(1, piece) for piece in pieces]
    if trailers is not None:
        last = headers(1, end=ends, block=frames.encode_headers(trailers))
    elif ends:
        last = data(1, b"", end=True)
    else:
        last = b""
    if split_at is None:
        first = headers(1, block=block)
    else:
        first = frames.frame(1, 0, 1, block[:split_at]) + frames.frame(9, 4, 1, block[split_at:])
    return first + b"".join(bodies) + last


def is_whole_to_h2(request):
    """Return whether h2 takes the bytes as a whole request, or else what it finds wrong."""
    server = h2.connection.H2Connection(
        h2.config.H2Configuration(client_side=False, header_encoding=None)
    )
    try:
        events = server.receive_data(frames.PREFACE + frames.frame(4, 0, 0) + request)
    except h2.exceptions.ProtocolError as error:
        return repr(error)
    return any(isinstance(event, h2.events.StreamEnded) for event in events)


def check(fields, pieces=(), trailers=None, *, ends=True, split_at=None):
    """See that h2 and our connection find the same requests whole, and which is reset."""
    request = sent(fields, pieces, trailers, ends=ends, split_at=split_at)
    expected = is_whole_to_h2(request)
    server = Server()
    server.feed(request)
    reset = (frames.RST_STREAM, 0, 1, Http2ErrorCode.PROTOCOL_ERROR.to_bytes(4, "big"))
    assert (reset in server.frames()) is isinstance(expected, str), expected
    assert (1 in server.recorder.ended) is (expected is True)
    # Only the stream ends.
    server.open(3)
    assert server.recorder.events[-1][:2] == ("headers", 3)
    return expected


def test_each_rule_that_one_change_breaks():
    found = Counter()
    kinds = [*zip(repeat("put"), FIELDS_OF_BOTH), ("leave out", None), ("move", None)]
    for at, (kind, field) in product(PLACES, kinds):
        change = [(kind, at, field)]
        found[check(changed(WELL_FORMED, change), [b"abc"])] += 1
        found[check(WELL_FORMED, [b"abc"], changed([TRAILER], change))] += 1
    assert found[True] > 100
    assert sum(count for text, count in found.items() if text is not True) > 400


@SAME
@given(
    st.lists(CHANGE, max_size=3), st.lists(st.sampled_from([b"", b"a", b"abc"]), max_size=2), TRAILERS,
    st.sampled_from([True, True, True, False]), st.none() | st.integers(0, 30),
)  # fmt: skip
def test_requests_that_break_several_rules(changes, pieces, trailers, ends, split_at):
    fields = changed(WELL_FORMED, changes)
    # h2 does not compare a length with a body that trailers end.
    assume(trailers is None or all(name != b"content-length" for name, _ in fields))
    check(fields, pieces, trailers, ends=ends, split_at=split_at)
