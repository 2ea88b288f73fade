"""Time at which requests leave for stubs: one alone at once, others together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from gpubridge.dataplane import SendTurn
from tests.fuzz.stub_desk import Desk, record

_FULL = 6


class Turns:
    """The turns of an event loop that has events as long as its pipe has."""

    def __init__(self) -> None:
        self.events, self._source = os.pipe()
        self._due: list[Callable[[], None]] = []
        self.turn = SendTurn(self._due.append, self.events, 64)

    def end(self) -> bool:
        """End a turn; returns whether something was due."""
        due, self._due[:] = list(self._due), []
        for callback in due:
            callback()
        return bool(due)

    def have_events(self) -> None:
        os.write(self._source, b"x")

    def take_events(self) -> None:
        os.read(self.events, 1)

    def close(self) -> None:
        os.close(self.events)
        os.close(self._source)


@pytest.fixture
def turns() -> Iterator[Turns]:
    turns = Turns()
    yield turns
    turns.close()


@pytest.fixture
def desks(turns: Turns) -> Iterator[list[Desk]]:
    """Two stubs of one event loop."""
    desks = [Desk(turn=turns.turn) for _ in range(2)]
    yield desks
    for desk in desks:
        desk.die(0)
        desk.close()


def batches(desk: Desk) -> list[int]:
    """Return how many batches each message to a stub had."""
    return [int.from_bytes(message[4:8], "little") for message in desk.messages]


def test_a_request_that_comes_alone_leaves_at_once(turns: Turns, desks: list[Desk]) -> None:
    for desk in desks:
        desk.enter(1)
        assert batches(desk) == [1]
    assert not turns.end()


class Likely:
    """Says that single requests follow one another until two come together."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def sent(self, alone: bool) -> bool:
        self.told.append(alone)
        return alone

    def answered(self) -> None:
        pass


def answer(desk: Desk) -> None:
    """Answer all that a stub has."""
    for sequence, (asked,) in list(desk.flights.items()):
        desk.complete((sequence, [record(asked.request.ticket)]))
    desk.flights.clear()
    desk.messages.clear()


def test_one_after_the_other_leave_at_once_whatever_else_comes(
    turns: Turns, desks: list[Desk]
) -> None:
    desk, waits = desks[0], Likely()
    desk.in_flight.poll_with(waits)
    desk.enter(1)
    answer(desk)
    turns.have_events()
    desk.enter(1)
    assert batches(desk) == [1]
    desk.enter(1)
    assert batches(desk) == [1]
    turns.take_events()
    turns.end()
    assert batches(desk) == [1, 1]
    assert waits.told == [True, True, False]
    answer(desk)
    # They do not come one after the other any more.
    turns.have_events()
    desk.enter(1)
    assert batches(desk) == []
    turns.take_events()
    turns.end()
    assert batches(desk) == [1]


def test_requests_of_a_turn_leave_together_for_each_stub(turns: Turns, desks: list[Desk]) -> None:
    turns.have_events()
    for _ in range(3):
        for desk in desks:
            desk.enter(1)
    assert [batches(desk) for desk in desks] == [[], []]
    turns.take_events()
    assert turns.end()
    assert [batches(desk) for desk in desks] == [[3], [3]]
    assert not turns.end()


def test_requests_wait_for_those_still_to_be_read(turns: Turns, desks: list[Desk]) -> None:
    desk = desks[0]
    turns.have_events()
    desk.enter(1)
    turns.end()
    desk.enter(1)
    turns.take_events()
    turns.end()
    # However many turns that was: nothing is sent twice, nothing is forgotten.
    assert sum(batches(desk)) == 2


def test_no_request_waits_for_ever(turns: Turns, desks: list[Desk]) -> None:
    turns.have_events()
    desks[0].enter(1)
    until = time.monotonic() + 30
    while turns.end():
        assert time.monotonic() < until
    assert batches(desks[0]) == [1]


def test_a_full_message_leaves_at_once(turns: Turns, desks: list[Desk]) -> None:
    desk = desks[0]
    turns.have_events()
    for _ in range(_FULL + 1):
        desk.enter(1)
    assert batches(desk) == [_FULL]
    turns.take_events()
    turns.end()
    assert batches(desk) == [_FULL, 1]


def test_a_stub_that_dies_keeps_nothing_from_others(turns: Turns, desks: list[Desk]) -> None:
    dying = desks[0]
    turns.have_events()
    for desk in desks:
        desk.enter(1)
    _, unstarted = dying.die(0)
    assert unstarted == [dying.asked[0].request]
    turns.take_events()
    turns.end()
    assert [batches(desk) for desk in desks] == [[], [1]]


def test_what_follows_an_answer_may_come_alone_again(turns: Turns, desks: list[Desk]) -> None:
    desk = desks[0]
    for sequence in (1, 2):
        desk.enter(1)
        (asked,) = desk.flights[sequence]
        desk.complete((sequence, [record(asked.request.ticket)]))
    assert batches(desk) == [1, 1]
    assert not turns.end()
