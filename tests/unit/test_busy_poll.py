"""Staying awake for the next message: when, for how long, and when not."""

import asyncio
import select
import socket
import threading

import pytest
import uvloop

from gpubridge.config.python_backend import PythonBackendSettings
from gpubridge.engine.ipc.busy_poll import BusyPoll, descriptor_of_events
from gpubridge.errors import BridgeError
from gpubridge.tensor.native import absence, native
from gpubridge.transport import wait_predictor
from gpubridge.transport.channel import Channel, ChannelClosed, pair
from gpubridge.transport.wait_predictor import WaitPredictor, busy_poll_ns
from tests.fuzz.fake_stub import FakeStub, record

AWAKE = 1000


class Clock:
    """Time that passes when a test says so; others take the processor for ``taken``."""

    def __init__(self):
        self.now = 0
        self.taken = 0
        self.offers = 0

    def monotonic_ns(self):
        return self.now

    def sched_yield(self):
        self.offers += 1
        self.now += self.taken


class Loop:
    """Runs what is due, turn by turn."""

    def __init__(self):
        self.due = []

    def call_soon(self, callback):
        self.due.append(callback)

    def turn(self):
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic_ns", clock.monotonic_ns)
    monkeypatch.setattr("os.sched_yield", clock.sched_yield)
    # Compiled code has its own.
    monkeypatch.setattr(wait_predictor, "native", lambda: None)
    return clock


@pytest.fixture
def ends():
    channels = tuple(Channel(end) for end in pair())
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture(params=["compiled", "in Python"])
def waits(request, monkeypatch):
    """Waits of either kind: both look in the same way."""
    if request.param == "in Python":
        monkeypatch.setattr(wait_predictor, "native", lambda: None)
    elif native() is None:
        pytest.skip(f"the compiled module is not there: {absence()}")
    return WaitPredictor(AWAKE)


def offered(waits):
    """Offer the processor once; returns whether others wanted it."""
    assert not waits.stay_awake(-1, 0)
    return waits.taken


def after_short_waits(count):
    waits = WaitPredictor(AWAKE)
    for _ in range(count):
        waits.begin(0)
        waits.end(2 * AWAKE - 1)
    return waits


def test_a_run_of_short_waits_makes_the_next_likely_to_be_short():
    assert not after_short_waits(7).begin(0)
    assert after_short_waits(8).begin(0)


@pytest.mark.parametrize("spoil", ["a long wait", "a crowd"])
def test_a_run_begins_anew_after(spoil):
    waits = after_short_waits(8)
    if spoil == "a crowd":
        waits.crowd()
    else:
        waits.end(2 * AWAKE)
    assert not waits.begin(0)


def in_vain(waits, count):
    """Give up so many waits that were likely to be short, and were asleep."""
    for _ in range(count):
        waits.begin(0)
        waits.give_up()
        waits.end(AWAKE)
    return waits


def test_a_wait_now_and_then_may_be_spent_awake_in_vain():
    waits = after_short_waits(32)
    for _ in range(10):
        assert in_vain(waits, 1).begin(0)
        for _ in range(8):
            waits.end(0)


@pytest.mark.parametrize("run", [32, 1000])
def test_polls_in_vain_are_not_repeated(run):
    waits = in_vain(after_short_waits(run), 4)
    for _ in range(4):
        assert not waits.begin(0)
        waits.end(0)
    assert waits.begin(0)


def test_a_wait_that_has_ended_was_not_in_vain():
    waits = after_short_waits(8)
    waits.give_up()
    assert waits.begin(0)


def test_work_that_is_done_at_once_is_not_polled_for():
    waits = after_short_waits(8)
    waits.alone = False
    assert not waits.begin(0)


def test_a_poll_of_no_time_is_none():
    waits = WaitPredictor(0)
    for _ in range(20):
        waits.begin(5)
        waits.end(5)
    assert not waits.begin(5)


def test_other_work_on_the_processor_is_left_alone_for_long(clock):
    waits = after_short_waits(8)
    clock.taken = 600_000
    assert offered(waits)
    for _ in range(200):
        waits.end(0)
        assert not waits.begin(0)


def test_a_client_that_takes_the_processor_is_no_other_work(clock):
    waits = after_short_waits(8)
    assert not offered(waits)
    clock.taken = 50_000
    assert offered(waits)
    assert waits.begin(0)


def test_a_single_processor_is_never_kept_awake(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert busy_poll_ns(200) == 200_000
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert busy_poll_ns(200) == 0


def one_after_the_other(poll, clock, count):
    for _ in range(count):
        poll.sent(alone=True)
        clock.now += AWAKE - 1
        poll.answered()
        clock.now += AWAKE - 1


def test_the_loop_stays_awake_where_one_request_follows_the_other(clock):
    loop = Loop()
    poll = BusyPoll(loop, AWAKE)
    one_after_the_other(poll, clock, 7)
    poll.sent(alone=True)
    assert not loop.due
    poll.answered()
    for _ in range(5):
        assert loop.due
        loop.turn()
    clock.now += AWAKE
    loop.turn()
    assert not loop.due
    assert clock.offers == 5


def test_the_loop_sleeps_where_it_stayed_awake_in_vain(clock):
    loop = Loop()
    poll = BusyPoll(loop, AWAKE)
    one_after_the_other(poll, clock, 9)
    # The client is not to be heard for as long as the loop stays awake for it.
    clock.now += AWAKE
    loop.turn()
    assert not loop.due
    poll.sent(alone=True)
    assert loop.due
    clock.now += AWAKE // 2
    poll.answered()
    # Later than the loop stays awake for the stub, and sooner than it would for the client.
    clock.now += AWAKE // 2 + 1
    loop.turn()
    assert not loop.due


def test_the_loop_sleeps_where_requests_come_together(clock):
    loop = Loop()
    poll = BusyPoll(loop, AWAKE)
    for _ in range(20):
        poll.sent(alone=True)
        poll.sent(alone=False)
        clock.now += 3 * AWAKE
        poll.answered()
        assert not loop.due


def test_the_loop_sleeps_when_somebody_wants_the_processor(clock):
    loop = Loop()
    poll = BusyPoll(loop, 10 * wait_predictor._TAKEN_NS)
    one_after_the_other(poll, clock, 9)
    poll.sent(alone=True)
    clock.taken = 2 * wait_predictor._TAKEN_NS
    loop.turn()
    assert clock.offers
    assert not loop.due


def test_poll_leaves_the_message_to_receive(ends, waits):
    here, there = ends
    there.send(b"\x20message")
    assert here.poll(10**12, waits)
    assert here.receive() == (b"\x20message", [])


def test_poll_leaves_a_closed_channel_to_receive(ends, waits):
    here, there = ends
    there.close()
    assert here.poll(10**12, waits)
    with pytest.raises(ChannelClosed):
        here.receive()


def test_poll_ends_without_a_message(ends, waits):
    here, there = ends
    assert not here.poll(1000, waits)
    there.send(b"\x20later")
    assert here.receive() == (b"\x20later", [])


def test_poll_without_a_message_was_in_vain(ends, waits, monkeypatch):
    # Other processes that run meanwhile are no reason to sleep.
    monkeypatch.setattr(wait_predictor, "_TAKEN_NS", 10**12)
    monkeypatch.setattr(wait_predictor, "_CONTENDED_NS", 10**12)
    for _ in range(8):
        waits.begin(0)
        waits.end(0)
    assert waits.begin(0)
    ends[1].send(b"\x20message")
    assert ends[0].poll(0, waits)
    assert waits.begin(0)
    ends[0].receive()
    assert not ends[0].poll(0, waits)
    assert not waits.begin(0)


def test_poll_sees_what_comes_while_it_looks(ends, waits, monkeypatch):
    # Other processes that run meanwhile are no reason to sleep.
    monkeypatch.setattr(wait_predictor, "_TAKEN_NS", 10**12)
    here, there = ends
    later = threading.Timer(0.01, there.send, [b"\x20later"])
    later.start()
    assert here.poll(10**12, waits)
    later.join()
    assert here.receive() == (b"\x20later", [])


def test_poll_ends_when_somebody_wants_the_processor(ends, waits, monkeypatch):
    # No time is too short: another process had the processor for longer.
    monkeypatch.setattr(wait_predictor, "_TAKEN_NS", -1)
    assert not ends[0].poll(10**12, waits)
    assert waits.taken


def test_the_loop_says_when_it_has_events():
    loop = uvloop.new_event_loop()
    here, there = socket.socketpair()
    try:
        loop.add_reader(here, lambda: None)
        loop.call_soon(loop.stop)
        loop.run_forever()
        events = select.poll()
        events.register(descriptor_of_events(loop), select.POLLIN)
        assert not events.poll(0)
        there.send(b"x")
        assert events.poll(10_000)
        loop.remove_reader(here)
    finally:
        loop.close()
        here.close()
        there.close()


def test_a_loop_that_does_not_say_has_a_turn_each_time():
    loop = asyncio.SelectorEventLoop()
    try:
        assert descriptor_of_events(loop) == -1
    finally:
        loop.close()


def test_the_time_is_a_setting():
    read = PythonBackendSettings.from_backend_config
    assert read({}).busy_poll_us == 200
    assert read({"busy-poll-us": "0"}).busy_poll_us == 0
    for wrong in ("-1", "10001"):
        with pytest.raises(BridgeError, match="busy-poll-us expects 0 to 10000 microseconds"):
            read({"busy-poll-us": wrong})
    with pytest.raises(BridgeError, match="busy-poll-us expects an integer, got 'soon'"):
        read({"busy-poll-us": "soon"})


def test_the_requests_at_a_stub_say_when_they_come_alone():
    told = []

    class Waits:
        def sent(self, alone):
            told.append(alone)
            return False

        def answered(self):
            told.append("answered")

    fake_stub = FakeStub()
    fake_stub.in_flight.poll_with(Waits())
    for _ in range(2):
        # Of a crowd that goes on it is enough to hear once.
        for _ in range(3):
            fake_stub.enter(1)
        for sequence, (asked,) in list(fake_stub.flights.items()):
            fake_stub.complete((sequence, [record(asked.request.ticket)]))
        fake_stub.flights.clear()
    assert told == 2 * [True, False, "answered"]
    fake_stub.close()
