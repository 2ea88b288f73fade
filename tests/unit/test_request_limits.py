"""However many requests are open, the next one is read: it may be what they wait for.

What bounds them is memory: without that, the next one is refused at once.
"""

import asyncio
import re

import pytest
from hypothesis import given, strategies as st

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw
from tests.unit.http2_frames import Http2ErrorCode, rst_stream_frame, window_update_frame
from tests.unit.http_endpoint import Endpoint, post

DATA = 0
UNAVAILABLE = 14
MIB = 1 << 20
NUMBERS = re.compile(rb"keep [0-9]+ bytes .* [0-9]+ of [0-9]+ bytes are in use")


def request(number, model="m"):
    """Return the message of a request whose answer has a number of four digits."""
    made = raw(("A", "FP32", [1], b"%04d" % number), id=str(number))
    made.model_name = model
    return message(made.SerializeToString())


def unary(number, stream_id):
    return head(stream_id, "ModelInfer") + frame(DATA, 1, stream_id, request(number))


def streamed(number, stream_id, model="m"):
    return frame(DATA, 0, stream_id, request(number, model))


def begun(stream_id):
    """Return a control call without the last byte of its message."""
    return head(stream_id, "ModelConfig") + frame(DATA, 0, stream_id, message(b"abc")[:-1])


def rest(stream_id):
    return frame(DATA, 1, stream_id, b"c")


def opened(*stream_ids, **options):
    endpoint = GrpcEndpoint(deferred=True, **options)
    endpoint.receive(PREFACE + b"".join(head(each, "ModelStreamInfer") for each in stream_ids))
    return endpoint


async def finish(endpoint):
    """Answer all that waits, and see that nothing is charged for what is over."""
    while endpoint.waiting:
        await endpoint.settle()
    await asyncio.sleep(0)
    endpoint.lose()
    assert endpoint.connection.account.held == 0
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0


def answer_newest(endpoint):
    model, newest = endpoint.waiting.pop()
    model.answer(newest)


# -- what frees them comes last ----------------------------------------------------------------------

OPEN = 300
LAST = {
    "decoupled requests of one stream": (
        (1,),
        lambda number: streamed(number, 1, "d"),
    ),
    "requests of one stream": ((1,), lambda number: streamed(number, 1)),
    "requests of many streams": (
        range(1, 2 * OPEN, 2),
        lambda number: streamed(number, 2 * number + 1, "d"),
    ),
    "calls": ((), lambda number: unary(number, 2 * number + 1)),
    "calls beside a stream": (
        (1,),
        lambda number: unary(number, 2 * number + 1) if number else streamed(number, 1, "d"),
    ),
}


@pytest.mark.parametrize(("streams", "ask"), LAST.values(), ids=LAST)
async def test_the_last_of_many_requests_is_submitted_while_all_are_open(streams, ask):
    endpoint = opened(*streams)
    for number in range(OPEN):
        endpoint.receive(ask(number))
    assert endpoint.submitted == OPEN
    while endpoint.waiting:
        answer_newest(endpoint)
    await asyncio.sleep(0)
    for number in range(OPEN):
        assert b"%04d" % number in endpoint.sent
    assert {status for each in endpoint.statuses().values() for status in each} <= {0}
    await finish(endpoint)


async def test_as_many_calls_as_are_open_may_be_cancelled_together():
    endpoint = opened()
    endpoint.receive(b"".join(unary(number, 2 * number + 1) for number in range(1000)))
    for number in range(1, 1000):
        endpoint.receive(rst_stream_frame(2 * number + 1, Http2ErrorCode.CANCEL))
    assert len(endpoint.cancelled) == 999
    assert not endpoint.connection.http2.closed
    del endpoint.waiting[1:]
    answer_newest(endpoint)
    await asyncio.sleep(0)
    assert endpoint.statuses() == {1: [0]}
    endpoint.lose()


def test_the_last_of_many_pipelined_requests_is_taken_while_all_are_open():
    endpoint = Endpoint(deferred=True)
    bodies = [b"%d" % number + b"x" * 5000 for number in range(200)]
    endpoint.receive(*map(post, bodies))
    assert len(endpoint.handlers) == 200
    for handler in reversed(endpoint.handlers):
        handler.answer()
    assert endpoint.answers() == [(200, body) for body in bodies]


# -- without memory ------------------------------------------------------------------------------------

TURNED_AWAY = {
    "calls": ((), lambda number: unary(number, 2 * number + 1)),
    "requests of a stream": ((1,), lambda number: streamed(number, 1)),
    "decoupled requests of a stream": ((1,), lambda number: streamed(number, 1, "d")),
}


def fill(endpoint, ask):
    """Ask until a request is refused; return how many were asked."""
    number = 0
    while endpoint.submitted == number:
        endpoint.receive(ask(number))
        number += 1
        assert number < 2000
    return number


@pytest.mark.parametrize(("streams", "ask"), TURNED_AWAY.values(), ids=TURNED_AWAY)
async def test_requests_that_there_is_no_memory_for_are_refused_at_once(streams, ask):
    endpoint = opened(*streams, arena_limit=4 * MIB)
    number = fill(endpoint, ask)
    await asyncio.sleep(0)
    assert number > 200
    told = bytes(endpoint.sent)
    assert NUMBERS.search(told.replace(b"%20", b" "))
    # The others go on, and a client that holds little is served as ever.
    other = opened(1, beside=endpoint)
    other.receive(streamed(7, 1))
    other.deferred = endpoint.deferred = False
    await other.settle()
    await endpoint.settle()
    assert b"0007" in endpoint.sent + other.sent
    assert all(b"%04d" % each in endpoint.sent for each in range(number - 1))
    # With their answers there is room again.
    endpoint.receive(ask(number))
    await asyncio.sleep(0)
    assert b"%04d" % number in endpoint.sent
    other.lose()
    await finish(endpoint)


@pytest.mark.parametrize(("streams", "ask"), TURNED_AWAY.values(), ids=TURNED_AWAY)
async def test_control_calls_pass_where_requests_have_taken_all_memory(streams, ask):
    endpoint = opened(*streams, arena_limit=4 * MIB)
    endpoint.receive(begun(3))
    fill(endpoint, lambda number: ask(number + 100))
    # As many as are answered; of those that stay open some.
    for stream_id in range(6001, 7001, 2):
        endpoint.receive(begun(stream_id), rest(stream_id))
    left_open = range(7001, 7401, 2)
    for stream_id in left_open:
        endpoint.receive(begun(stream_id))
    await asyncio.sleep(0)
    refused = endpoint.statuses()
    assert all(refused.pop(stream_id) == [0] for stream_id in range(6001, 7001, 2))
    assert 3 not in refused
    taken = [stream_id for stream_id in left_open if stream_id not in refused]
    assert 50 < len(taken) < 150
    for stream_id in (3, *taken):
        endpoint.receive(rest(stream_id))
    await asyncio.sleep(0)
    assert {endpoint.data(stream_id) for stream_id in (3, *taken)} == {message(b"3")}
    assert {status for each in endpoint.statuses().values() for status in each} == {0, UNAVAILABLE}
    await finish(endpoint)


async def test_pipelined_requests_that_there_is_no_memory_for_end_their_connection():
    endpoint = Endpoint(deferred=True, arena_limit=MIB)
    for _ in range(2000):
        endpoint.receive(post(b"x"))
    assert 200 < len(endpoint.handlers) < 2000
    for handler in endpoint.handlers:
        if handler.exchange is not None:
            handler.answer()
    *answers, (status, text) = endpoint.answers()
    assert {status for status, _ in answers} == {200}
    assert status == 503
    assert re.search(rb"[0-9]+ of 1048576 bytes are in use", text)
    assert endpoint.listener.budget.used == 0


async def test_a_client_that_reads_nothing_is_not_read_from_until_it_does():
    endpoint = opened(1)
    endpoint.deferred = False
    sent = 0
    while endpoint.submitted == sent:
        endpoint.receive(streamed(sent % 10_000, 1))
        sent += 1
        assert sent < 40_000
    assert sent > 1000
    assert endpoint.connection.account.total < 2 * MIB
    endpoint.receive(window_update_frame(0, 1 << 24) + window_update_frame(1, 1 << 24))
    await asyncio.sleep(0)
    assert endpoint.submitted == sent
    await finish(endpoint)


# -- random schedules ------------------------------------------------------------------------------------


class Client:
    """A client's connection, and what it has asked: calls, and the requests of each stream."""

    def __init__(self, beside=None):
        self.endpoint = GrpcEndpoint(deferred=True, beside=beside, arena_limit=MIB)
        self.endpoint.receive(PREFACE + window_update_frame(0, 1 << 24))
        self.next_stream = 1
        self.sent = 0
        self.calls: list[int] = []
        self.controls: list[int] = []
        self.asked: dict[int, int] = {}

    def new_stream(self):
        self.next_stream += 2
        return self.next_stream - 2

    def open_stream(self):
        stream_id = self.new_stream()
        self.endpoint.receive(
            head(stream_id, "ModelStreamInfer") + window_update_frame(stream_id, 1 << 24)
        )
        if stream_id not in self.endpoint.statuses():
            self.asked[stream_id] = 0

    def ask(self, kind, stream_id):
        if kind == "control":
            self.controls.append(self.new_stream())
            self.endpoint.receive(begun(self.controls[-1]), rest(self.controls[-1]))
            return
        if kind == "call":
            self.calls.append(self.new_stream())
            self.endpoint.receive(unary(self.sent, self.calls[-1]))
        else:
            self.asked[stream_id] += 1
            self.endpoint.receive(streamed(self.sent, stream_id, kind))
        self.sent += 1

    def cancel(self, stream_id):
        del self.asked[stream_id]
        self.endpoint.receive(rst_stream_frame(stream_id, Http2ErrorCode.CANCEL))

    def refused(self):
        """Count what was refused: calls, and requests of streams."""
        statuses = self.endpoint.statuses()
        calls = [each for each in self.calls if statuses.get(each) == [UNAVAILABLE]]
        streams = set(range(1, self.next_stream, 2)).difference(self.calls, self.controls)
        return len(calls) + sum(self.endpoint.data(each).count(b"are in use") for each in streams)

    def check_answers(self):
        """See that each call has one status, and each request of a stream one response."""
        statuses = self.endpoint.statuses()
        assert all(statuses[each] in ([0], [UNAVAILABLE]) for each in self.calls)
        assert all(statuses[each] == [0] for each in self.controls)
        for stream_id, count in self.asked.items():
            assert stream_id not in statuses
            data, told = self.endpoint.data(stream_id), 0
            while data:
                data, told = data[5 + int.from_bytes(data[1:5], "big") :], told + 1
            assert told == count


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["stream", "call", "call", "d", "d", "m", "m", "answer", "cancel", "control"]
        ),
        st.integers(0, 1),
        st.integers(0, 99),
        st.sampled_from([1, 60, 120]),
    ),
    min_size=4,
    max_size=14,
)


@given(operations=OPERATIONS)
def test_each_request_is_submitted_or_refused_at_once_and_answered_once(operations):
    async def scenario():
        first = Client()
        clients = first, Client(beside=first.endpoint)
        # The models are the first one's, and so is what waits.
        waiting = first.endpoint.waiting
        for kind, whose, at, count in operations:
            client = clients[whose]
            streams = list(client.asked)
            for _ in range(count):
                if kind == "answer" and waiting:
                    model, newest = waiting.pop(at % len(waiting))
                    model.answer(newest)
                elif kind in ("call", "control") or (kind in ("d", "m") and streams):
                    client.ask(kind, streams and streams[at % len(streams)])
            if kind == "stream":
                client.open_stream()
            elif kind == "cancel" and streams:
                client.cancel(streams[at % len(streams)])
            await asyncio.sleep(0)
            refused = sum(each.refused() for each in clients)
            assert sum(each.sent for each in clients) == first.endpoint.submitted + refused
        while waiting:
            answer_newest(first.endpoint)
        await asyncio.sleep(0)
        for client in clients:
            client.check_answers()
            client.endpoint.lose()
            assert client.endpoint.connection.account.held == 0
        first.endpoint.regions.close()
        assert first.endpoint.regions.budget.used == 0

    asyncio.run(scenario())
