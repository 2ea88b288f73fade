"""Time at which requests leave for stubs: one alone at once, others together."""

import os
import time
from collections.abc import Callable

import pytest

from gpubridge.dataplane import BusyPoll, SendTurn
from tests.fuzz.fake_stub import FakeStub, record

_FULL = 6


class Turns:
    """The turns of an event loop that has events as long as its pipe has."""

    def __init__(self):
        self.events, self._source = os.pipe()
        self._due: list[Callable[[], None]] = []
        self.turn = SendTurn(self._due.append, self.events, 64)

    def end(self):
        """End a turn; returns whether something was due."""
        due, self._due[:] = list(self._due), []
        for callback in due:
            callback()
        return bool(due)

    def have_events(self):
        os.write(self._source, b"x")

    def take_events(self):
        os.read(self.events, 1)

    def close(self):
        os.close(self.events)
        os.close(self._source)


@pytest.fixture
def turns():
    turns = Turns()
    yield turns
    turns.close()


@pytest.fixture
def fake_stubs(turns):
    """Two stubs of one event loop."""
    fake_stubs = [FakeStub(turn=turns.turn) for _ in range(2)]
    yield fake_stubs
    for fake_stub in fake_stubs:
        fake_stub.die(0)
        fake_stub.close()


def batches(fake_stub):
    """Return how many batches each message to a stub had."""
    return [int.from_bytes(message[4:8], "little") for message in fake_stub.messages]


def test_a_request_that_comes_alone_leaves_at_once(turns, fake_stubs):
    for fake_stub in fake_stubs:
        fake_stub.enter(1)
        assert batches(fake_stub) == [1]
    assert not turns.end()


def answer(fake_stub):
    """Answer all that a stub has."""
    for sequence, (asked,) in list(fake_stub.flights.items()):
        fake_stub.complete((sequence, [record(asked.request.ticket)]))
    fake_stub.flights.clear()
    fake_stub.messages.clear()


def test_one_after_the_other_leave_at_once_whatever_else_comes(turns, fake_stubs):
    fake_stub = fake_stubs[0]
    # Of a poll for so long, every wait is a short one.
    fake_stub.in_flight.poll_with(BusyPoll(lambda turn: None, -1, 10**15))
    for _ in range(9):
        fake_stub.enter(1)
        answer(fake_stub)
    turns.have_events()
    fake_stub.enter(1)
    assert batches(fake_stub) == [1]
    fake_stub.enter(1)
    assert batches(fake_stub) == [1]
    turns.take_events()
    turns.end()
    assert batches(fake_stub) == [1, 1]
    answer(fake_stub)
    # They do not come one after the other any more.
    turns.have_events()
    fake_stub.enter(1)
    assert batches(fake_stub) == []
    turns.take_events()
    turns.end()
    assert batches(fake_stub) == [1]


def test_requests_of_a_turn_leave_together_for_each_stub(turns, fake_stubs):
    turns.have_events()
    for _ in range(3):
        for fake_stub in fake_stubs:
            fake_stub.enter(1)
    assert [batches(fake_stub) for fake_stub in fake_stubs] == [[], []]
    turns.take_events()
    assert turns.end()
    assert [batches(fake_stub) for fake_stub in fake_stubs] == [[3], [3]]
    assert not turns.end()


def test_requests_wait_for_those_still_to_be_read(turns, fake_stubs):
    fake_stub = fake_stubs[0]
    turns.have_events()
    fake_stub.enter(1)
    turns.end()
    fake_stub.enter(1)
    turns.take_events()
    turns.end()
    # However many turns that was: nothing is sent twice, nothing is forgotten.
    assert sum(batches(fake_stub)) == 2


def test_no_request_waits_for_ever(turns, fake_stubs):
    turns.have_events()
    fake_stubs[0].enter(1)
    until = time.monotonic() + 30
    while turns.end():
        assert time.monotonic() < until
    assert batches(fake_stubs[0]) == [1]


def test_a_full_message_leaves_at_once(turns, fake_stubs):
    fake_stub = fake_stubs[0]
    turns.have_events()
    for _ in range(_FULL + 1):
        fake_stub.enter(1)
    assert batches(fake_stub) == [_FULL]
    turns.take_events()
    turns.end()
    assert batches(fake_stub) == [_FULL, 1]


def test_a_stub_that_dies_keeps_nothing_from_others(turns, fake_stubs):
    dying = fake_stubs[0]
    turns.have_events()
    for fake_stub in fake_stubs:
        fake_stub.enter(1)
    _, unstarted = dying.die(0)
    assert unstarted == [dying.asked[0].request]
    turns.take_events()
    turns.end()
    assert [batches(fake_stub) for fake_stub in fake_stubs] == [[], [1]]


def test_a_request_after_a_response_may_come_alone_again(turns, fake_stubs):
    fake_stub = fake_stubs[0]
    for sequence in (1, 2):
        fake_stub.enter(1)
        (asked,) = fake_stub.flights[sequence]
        fake_stub.complete((sequence, [record(asked.request.ticket)]))
    assert batches(fake_stub) == [1, 1]
    assert not turns.end()
