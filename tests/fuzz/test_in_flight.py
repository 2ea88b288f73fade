"""Outcomes of the requests at a stub: one each, whatever the stub says, and all memory back."""

import hypothesis.strategies as st
from hypothesis import example, given

from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.messages import ResponseFlag
from tests.fuzz.budget import fuzzed
from tests.fuzz.fake_stub import FakeStub, RequestAtStub, record


class Play:
    """A stub that is honest but takes its time, as the drawn ``data`` say."""

    def __init__(self, data) -> None:
        self.draw = data.draw
        self.fake_stub = FakeStub()
        # What the stub knows: the tickets that it has, and which requests it has ended.
        self.tickets: dict[RequestAtStub, int] = {}
        self.over: set[RequestAtStub] = set()
        self.going_on: set[RequestAtStub] = set()
        self.sent: dict[RequestAtStub, int] = {}

    def step(self) -> None:
        live = [asked for asked in self.tickets if asked not in self.over]
        steps = [self.enter] + [self.complete] * bool(self.fake_stub.flights)
        if live:
            chosen = self.draw(st.sampled_from(live))
            steps += [lambda: self.respond(chosen), lambda: self.finish(chosen)]
        self.draw(st.sampled_from(steps))()
        if self.draw(st.booleans()):
            self.fake_stub.in_flight.release_kept()

    def enter(self) -> None:
        before = len(self.fake_stub.asked)
        self.fake_stub.enter(self.draw(st.integers(1, 3)))
        self.tickets |= {asked: asked.request.ticket for asked in self.fake_stub.asked[before:]}
        assert len(set(self.tickets.values())) == len(self.tickets)

    def complete(self) -> None:
        sequence = self.draw(st.sampled_from(sorted(self.fake_stub.flights)))
        batch = self.fake_stub.flights.pop(sequence)
        records = [self.result(asked) for asked in self.draw(st.permutations(batch))]
        feed = self.fake_stub.feed
        before, at_stub = feed.open_requests, (feed.batches, feed.in_flight)
        assert self.fake_stub.complete((sequence, records)).times == 1
        assert (feed.batches + 1, feed.in_flight + len(batch)) == at_stub
        going_on = [asked for asked in batch if asked in self.going_on]
        assert feed.open_requests == before + len(going_on)
        for asked in batch:
            if asked in self.over:
                del self.tickets[asked]

    def result(self, asked: RequestAtStub):
        flags = ResponseFlag.OPEN | ResponseFlag.EMPTY
        if asked not in self.over:
            if self.draw(st.booleans()):
                flags = self.draw(st.sampled_from([0, ResponseFlag.ERROR]))
                self.over.add(asked)
            else:
                self.going_on.add(asked)
        self.let_go(self.tickets[asked])
        return record(self.tickets[asked], flags)

    def let_go(self, ticket: int) -> None:
        """Be done with a request's memory, or keep it."""
        self.fake_stub.control.lent[ticket] = self.draw(st.integers(0, 1))

    def respond(self, asked: RequestAtStub) -> None:
        flags = ResponseFlag.OPEN | self.draw(st.sampled_from([0, 1, ResponseFlag.EMPTY]))
        assert not self.fake_stub.respond(record(self.tickets[asked], flags))
        self.sent[asked] = self.sent.get(asked, 0) + (not flags & ResponseFlag.EMPTY)

    def finish(self, asked: RequestAtStub) -> None:
        flags = self.draw(st.sampled_from([0, ResponseFlag.ERROR, ResponseFlag.EMPTY]))
        closed = self.fake_stub.respond(record(self.tickets[asked], flags))
        self.over.add(asked)
        assert closed == (asked in self.going_on)
        if asked in self.going_on:
            self.going_on.discard(asked)
            self.let_go(self.tickets.pop(asked))


@fuzzed()
@given(st.data())
def test_every_request_has_one_end_however_batches_and_responses_interleave(data):
    play = Play(data)
    fake_stub = play.fake_stub
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            play.step()
        started, unstarted = fake_stub.die(data.draw(st.integers(0, len(fake_stub.asked) + 1)))
        assert len(set(started + unstarted)) == len(started + unstarted)
        for asked in fake_stub.asked:
            left = (asked.request in started) + (asked.request in unstarted)
            assert len(asked.outcomes) + left == 1
            assert len(asked.outcomes) == (asked in play.over)
            assert len(asked.partials) == play.sent.get(asked, 0)
        assert fake_stub.arena.lent() == (0, 0)
        assert fake_stub.in_flight.open_requests == 0
    finally:
        fake_stub.close()


@fuzzed()
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(1, 8),
            st.lists(
                st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 2, 4, 5, 8, 12, 15])),
                max_size=4,
            ),
        ),
        max_size=6,
    ),
    st.integers(0, 9),
)
# One that goes on, another that there is not: the first is still in its batch.
@example([2], [(False, 1, [(0, 12), (7, 0)])], 0)
def test_a_stub_that_lies_of_its_batches_costs_no_request_its_end(sizes, messages, started_last):
    fake_stub = FakeStub()
    try:
        for size in sizes:
            fake_stub.enter(size)
        try:
            for alone, sequence, records in messages:
                made = [record(ticket, flags) for ticket, flags in records]
                if alone:
                    fake_stub.respond(*made)
                else:
                    fake_stub.complete((sequence, made))
        except MalformedMessage:
            pass
        started, unstarted = fake_stub.die(started_last)
        for asked in fake_stub.asked:
            request = asked.request
            assert len(asked.outcomes) + started.count(request) + unstarted.count(request) == 1
        assert fake_stub.arena.lent() == (0, 0)
    finally:
        fake_stub.close()


def test_memory_that_a_stub_is_done_with_makes_room_at_once():
    fake_stub = FakeStub(tickets=8)
    try:
        fake_stub.enter(8)
        ((sequence, batch),) = fake_stub.flights.items()
        tickets = [asked.request.ticket for asked in batch]
        # The model keeps its inputs beyond their answers.
        fake_stub.complete((sequence, [record(ticket, ResponseFlag.ERROR) for ticket in tickets]))
        del fake_stub.flights[sequence]
        assert fake_stub.in_flight.free_tickets == 0
        fake_stub.control.lent[tickets[0]] = fake_stub.control.lent[tickets[1]] = 0
        assert fake_stub.in_flight.free_tickets == 2
        fake_stub.control.lent[tickets[2]] = 0
        fake_stub.enter(3)
        assert fake_stub.in_flight.free_tickets == 0
    finally:
        fake_stub.close()
