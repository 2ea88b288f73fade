"""Staying awake for the next message: when, for how long, and when not."""

import asyncio
import select
import socket
import threading

import pytest
import uvloop

from gpubridge.config.python_backend import PythonBackendSettings
from gpubridge.dataplane import BusyPoll
from gpubridge.engine.ipc.busy_poll import descriptor_of_events
from gpubridge.errors import BridgeError
from gpubridge.tensor.native import absence, native
from gpubridge.transport.channel import Channel, ChannelClosed, pair
from gpubridge.transport.wait_predictor import WaitPredictor, busy_poll_ns
from tests.fuzz.fake_stub import FakeStub, record

AWAKE = 1000


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 0


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
def ends():
    channels = tuple(Channel(end) for end in pair())
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture(params=["compiled", "in Python"])
def kind(request):
    """Predictors of either kind: both do the same."""
    if request.param == "in Python":
        return WaitPredictor
    if native() is None:
        pytest.skip(f"the compiled module is not there: {absence()}")
    return native().WaitPredictor


def after_short_waits(kind, count, **limits):
    waits = kind(AWAKE, **limits)
    for _ in range(count):
        waits.begin(0)
        waits.end(2 * AWAKE - 1)
    return waits


def test_a_run_of_short_waits_makes_the_next_likely_to_be_short(kind):
    assert not after_short_waits(kind, 7).begin(0)
    assert after_short_waits(kind, 8).begin(0)


@pytest.mark.parametrize("spoil", ["a long wait", "a crowd"])
def test_a_run_begins_anew_after(spoil, kind):
    waits = after_short_waits(kind, 8)
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


def test_a_wait_now_and_then_may_be_spent_awake_in_vain(kind):
    waits = after_short_waits(kind, 32)
    for _ in range(10):
        assert in_vain(waits, 1).begin(0)
        for _ in range(8):
            waits.end(0)


@pytest.mark.parametrize("run", [32, 1000])
def test_polls_in_vain_are_not_repeated(run, kind):
    waits = in_vain(after_short_waits(kind, run), 4)
    for _ in range(4):
        assert not waits.begin(0)
        waits.end(0)
    assert waits.begin(0)


def test_a_wait_that_has_ended_was_not_in_vain(kind):
    waits = after_short_waits(kind, 8)
    waits.give_up()
    assert waits.begin(0)


def test_work_that_is_done_at_once_is_not_polled_for(kind):
    waits = after_short_waits(kind, 8)
    waits.alone = False
    assert not waits.begin(0)


def test_a_poll_of_no_time_is_none(kind):
    waits = kind(0)
    for _ in range(20):
        waits.begin(5)
        waits.end(5)
    assert not waits.begin(5)


def test_other_work_on_the_processor_is_left_alone_for_long(kind):
    # No time is too short: other work had the processor for longer.
    waits = after_short_waits(kind, 8, contended_ns=-1)
    assert not waits.stay_awake(-1, 0)
    for _ in range(200):
        waits.end(0)
        assert not waits.begin(0)
    waits.end(0)


def test_a_client_that_takes_the_processor_is_no_other_work(kind):
    waits = after_short_waits(kind, 8, taken_ns=10**12, contended_ns=10**12)
    assert not waits.stay_awake(-1, 0)
    assert not waits.taken
    waits = after_short_waits(kind, 8, taken_ns=-1, contended_ns=10**12)
    assert not waits.stay_awake(-1, 0)
    assert waits.taken
    assert waits.begin(0)


def test_a_single_processor_is_never_kept_awake(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert busy_poll_ns(200) == 200_000
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert busy_poll_ns(200) == 0


@pytest.fixture
def clock():
    return Clock()


def polling(loop, clock, taken_ns=10**12):
    """Make what keeps a loop awake; the other work on this machine is no reason to sleep."""
    return BusyPoll(loop.call_soon, -1, AWAKE, taken_ns, lambda: clock.now)


def one_after_the_other(poll, clock, count):
    for _ in range(count):
        poll.sent(alone=True)
        clock.now += AWAKE - 1
        poll.answered()
        clock.now += AWAKE - 1


def test_the_loop_stays_awake_where_one_request_follows_the_other(clock):
    loop = Loop()
    poll = polling(loop, clock)
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


def test_the_loop_sleeps_where_it_stayed_awake_in_vain(clock):
    loop = Loop()
    poll = polling(loop, clock)
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


def test_the_loop_stays_awake_while_a_stub_that_called_goes_on(clock):
    loop = Loop()
    poll = polling(loop, clock)
    for _ in range(4):
        poll.sent(alone=True)
        clock.now += AWAKE
        poll.paused()
        clock.now += 9 * AWAKE
        assert not loop.due
        poll.resumed()
        clock.now += AWAKE
        poll.answered()
        clock.now += AWAKE
    poll.sent(alone=True)
    assert loop.due


def test_the_loop_sleeps_where_requests_come_together(clock):
    loop = Loop()
    poll = polling(loop, clock)
    for _ in range(20):
        poll.sent(alone=True)
        poll.sent(alone=False)
        clock.now += 3 * AWAKE
        poll.answered()
        assert not loop.due


def test_the_loop_sleeps_when_somebody_wants_the_processor(clock):
    loop = Loop()
    # No time is too short: another process had the processor for longer.
    poll = polling(loop, clock, -1)
    one_after_the_other(poll, clock, 9)
    poll.sent(alone=True)
    assert loop.due
    loop.turn()
    assert not loop.due


def test_poll_leaves_the_message_to_receive(ends, kind):
    here, there = ends
    waits = kind(AWAKE)
    there.send(b"\x20message")
    assert here.poll(10**12, waits)
    assert here.receive() == (b"\x20message", [])


def test_poll_leaves_a_closed_channel_to_receive(ends, kind):
    here, there = ends
    there.close()
    assert here.poll(10**12, kind(AWAKE))
    with pytest.raises(ChannelClosed):
        here.receive()


def test_poll_ends_without_a_message(ends, kind):
    here, there = ends
    assert not here.poll(1000, kind(AWAKE))
    there.send(b"\x20later")
    assert here.receive() == (b"\x20later", [])


def test_poll_without_a_message_was_in_vain(ends, kind):
    # Other processes that run meanwhile are no reason to sleep.
    waits = after_short_waits(kind, 8, taken_ns=10**12, contended_ns=10**12)
    assert waits.begin(0)
    ends[1].send(b"\x20message")
    assert ends[0].poll(0, waits)
    assert waits.begin(0)
    ends[0].receive()
    assert not ends[0].poll(0, waits)
    assert not waits.begin(0)


def test_poll_sees_what_comes_while_it_looks(ends, kind):
    # Other processes that run meanwhile are no reason to sleep.
    waits = kind(AWAKE, taken_ns=10**12)
    here, there = ends
    later = threading.Timer(0.01, there.send, [b"\x20later"])
    later.start()
    assert here.poll(10**12, waits)
    later.join()
    assert here.receive() == (b"\x20later", [])


def test_poll_ends_when_somebody_wants_the_processor(ends, kind):
    # No time is too short: another process had the processor for longer.
    waits = kind(AWAKE, taken_ns=-1)
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


def test_the_requests_at_a_stub_say_when_they_come_alone(clock):
    loop = Loop()
    fake_stub = FakeStub()
    fake_stub.in_flight.poll_with(polling(loop, clock))

    def round_of(requests):
        for _ in range(requests):
            fake_stub.enter(1)
        clock.now += AWAKE // 2
        for sequence, (asked,) in list(fake_stub.flights.items()):
            fake_stub.complete((sequence, [record(asked.request.ticket)]))
        fake_stub.flights.clear()
        clock.now += AWAKE // 2

    for requests in (3, 3, 3, 3):
        round_of(requests)
    # Each has answered soon.
    assert not loop.due
    for _ in range(5):
        round_of(1)
    assert loop.due
    fake_stub.close()
