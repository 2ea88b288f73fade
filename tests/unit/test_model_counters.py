"""Batches that are counted: whatever becomes of their requests, and places that no request fills."""

import pytest

from gpubridge.request import InferRequest
from gpubridge.telemetry.statistics import LatencyWindow, ModelStatistics
from gpubridge.transport.control import ABANDONED
from gpubridge.transport.messages import (
    Kind,
    ResponseFlag,
    encode_frame,
    encode_responses,
    encode_result_batch,
)
from tests.fuzz.fake_stub import NOW, FakeStub, record

OPEN = ResponseFlag.OPEN | ResponseFlag.EMPTY
# Of each request: it is queued until 1, its batch's steps take 1, 1 and the rest.
STEPS = (1, 1, NOW - 3)
LATE = NOW + 5


def enter(fake_stub, *sizes):
    """Send a batch; returns its requests."""
    requests = []
    for size in sizes:
        requests.append(InferRequest(b"", None, 0, (), lambda _: None, batch_size=size))
        requests[-1].on_partial = lambda _: None
    fake_stub.feed.submit(requests)
    fake_stub.sent += 1
    return requests


def complete(fake_stub, requests, *flags):
    made = [record(one.ticket, flag) for one, flag in zip(requests, flags, strict=True)]
    return fake_stub.complete((fake_stub.sent, made))


def figures(counters):
    return counters.success_count, counters.success_ns, counters.queue_ns, counters.fail_ns


def test_requests_that_succeed_and_fail_in_one_batch(fake_stub):
    requests = enter(fake_stub, 2, 3, 1)
    fake_stub.in_flight.cancel(requests[2], False, ABANDONED)
    complete(fake_stub, requests, 0, ResponseFlag.ERROR, ResponseFlag.CANCELLED)
    counters = fake_stub.counters
    assert (counters.inferences, counters.executions) == (2, 1)
    assert figures(counters) == (1, NOW, 1, 2 * NOW)
    assert (counters.input_ns, counters.infer_ns, counters.output_ns) == STEPS
    assert counters.failures == {"OTHER": 0, "BACKEND": 1, "CANCELED": 1, "REJECTED": 0}
    # The model was given all but the one that was cancelled.
    assert counters.batch_rows == {5: (1, *STEPS)}
    assert counters.last_ended_ns == 3


@pytest.mark.parametrize(
    ("flag", "rows"), [(ResponseFlag.ERROR, {5: (1, *STEPS)}), (ResponseFlag.CANCELLED, {})]
)
def test_a_batch_without_a_request_that_succeeds(fake_stub, flag, rows):
    requests = enter(fake_stub, 2, 3)
    for request in requests:
        fake_stub.in_flight.cancel(request, False, ABANDONED)
    complete(fake_stub, requests, flag, flag)
    counters = fake_stub.counters
    assert (counters.batch_rows, counters.executions, counters.inferences) == (rows, len(rows), 0)
    assert sum(counters.failures.values()) == 2


def test_batches_of_one_size_are_one_row(fake_stub):
    for size in (1, 1, 4):
        complete(fake_stub, enter(fake_stub, size), 0)
    assert fake_stub.counters.batch_rows == {1: (2, 2, 2, 2 * STEPS[2]), 4: (1, *STEPS)}
    assert fake_stub.counters.inferences == 6


def test_batches_that_end_together_are_counted_each(fake_stub):
    ended = [
        (fake_stub.sent, [record(one.ticket, 0)]) for (one,) in (enter(fake_stub, 1) for _ in "ab")
    ]
    fake_stub.complete(*ended)
    counters = fake_stub.counters
    assert (counters.input_ns, counters.infer_ns, counters.output_ns) == (2, 2, 2 * STEPS[2])
    assert counters.batch_rows == {1: (2, 2, 2, 2 * STEPS[2])}


def test_a_request_that_goes_on_is_counted_when_it_ends(fake_stub):
    going_on, done = enter(fake_stub, 3, 1)
    complete(fake_stub, (going_on, done), OPEN, 0)
    assert fake_stub.counters.batch_rows == {4: (1, *STEPS)}
    assert figures(fake_stub.counters) == (1, NOW, 1, 0)
    last = encode_responses([record(going_on.ticket, ResponseFlag.EMPTY)], 0)
    fake_stub.in_flight.take(last, LATE)
    assert figures(fake_stub.counters) == (2, NOW + LATE, 2, 0)
    # What its model did after `execute` is a part of it.
    assert fake_stub.counters.infer_ns == 2 * STEPS[1] + LATE - NOW
    assert fake_stub.counters.inferences == 4


def test_a_request_that_goes_on_and_fails(fake_stub):
    (going_on,) = enter(fake_stub, 3)
    complete(fake_stub, [going_on], OPEN)
    fake_stub.respond(record(going_on.ticket, ResponseFlag.ERROR))
    assert figures(fake_stub.counters) == (0, 0, 0, NOW)
    assert fake_stub.counters.failures["BACKEND"] == 1


@pytest.mark.parametrize(("flag", "failed"), [(ResponseFlag.EMPTY, 0), (ResponseFlag.ERROR, 1)])
def test_a_request_that_ends_before_its_batch_is_counted_with_it(fake_stub, flag, failed):
    (early,) = enter(fake_stub, 2)
    ticket = early.ticket
    assert not fake_stub.respond(record(ticket, flag))
    assert figures(fake_stub.counters) == (0, 0, 0, 0)
    fake_stub.complete((fake_stub.sent, [record(ticket, OPEN)]))
    assert fake_stub.counters.success_count == 1 - failed
    assert fake_stub.counters.failures["BACKEND"] == failed


def test_a_run_that_is_to_be_repeated_counts_like_any_other(fake_stub):
    requests = enter(fake_stub, 1, 0)
    completed = complete(fake_stub, requests, ResponseFlag.RESCHEDULED, ResponseFlag.RESCHEDULED)
    # No client waits for the requests that pad a batch.
    assert completed.returning == requests[:1]
    assert (fake_stub.counters.executions, fake_stub.counters.success_count) == (1, 1)
    assert [count for _, count in fake_stub.counters.duration_counts] == [1]


def test_a_place_that_no_request_fills_may_end_after_its_batch(fake_stub):
    requests = enter(fake_stub, 1, 0)
    complete(fake_stub, requests, OPEN, OPEN)
    for request in reversed(requests):
        fake_stub.respond(record(request.ticket, ResponseFlag.EMPTY))
    assert (fake_stub.counters.inferences, fake_stub.counters.executions) == (1, 1)


def test_durations_of_single_requests_are_kept_where_that_is_wanted():
    statistics = ModelStatistics("m", 1, window=LatencyWindow())
    fake_stub = FakeStub(statistics)
    try:
        complete(fake_stub, enter(fake_stub, 1, 1), 0, ResponseFlag.ERROR)
        # Microseconds; the last step takes all but three nanoseconds.
        expected = [NOW // 1000, 0, 0, 0, STEPS[2] // 1000]
        assert statistics.window.quantiles((1.0,), now=NOW) == [[us] for us in expected]
        assert list(statistics.window._observations) == [(NOW, (NOW, 1, *STEPS))]
    finally:
        fake_stub.close()


def test_only_what_is_followed_is_told_of_its_batch(fake_stub):
    complete(fake_stub, enter(fake_stub, 1), 0)
    (followed,) = requests = enter(fake_stub, 1)
    followed = InferRequest(b"", None, 0, (), lambda _: None)
    followed.trace = object()
    fake_stub.feed.submit([followed])
    fake_stub.sent += 1
    assert complete(fake_stub, [followed], 0).traced == [(fake_stub.sent, 1, 2, 3, [followed])]
    assert fake_stub.complete((fake_stub.sent - 1, [record(requests[0].ticket)])).traced == []


END = (1 << 64) - 1


@pytest.mark.parametrize(
    ("times", "bounded"),
    [
        ((END, END, END), (NOW, NOW, NOW)),
        ((0, 0, 0), (NOW // 2, NOW // 2, NOW // 2)),
        ((0, END, 0), (NOW // 2, NOW, NOW)),
        ((NOW - 1, NOW - 2, NOW - 3), (NOW - 1, NOW - 1, NOW - 1)),
        ((NOW - 3, NOW - 2, NOW + 1), (NOW - 3, NOW - 2, NOW)),
    ],
)
def test_times_that_a_stub_makes_up_are_bounded_by_arrival_and_now(times, bounded):
    fake_stub = FakeStub(ModelStatistics("m", 1, window=LatencyWindow()))
    try:
        request = InferRequest(b"", None, 0, (), lambda _: None)
        request.arrived, request.trace = NOW // 2, object()
        fake_stub.feed.submit([request])
        batch = encode_result_batch(1, times, 0, [record(request.ticket)])
        heard = fake_stub.take(encode_frame(Kind.RESULTS, [batch]))
        (traced,) = heard.traced
        started, called, ended = bounded
        assert (traced.started, traced.called, traced.ended) == bounded
        counters = fake_stub.counters
        assert figures(counters) == (1, NOW - NOW // 2, started - NOW // 2, 0)
        steps = called - started, ended - called, NOW - ended
        assert (counters.input_ns, counters.infer_ns, counters.output_ns) == steps
        assert counters.last_ended_ns == ended
    finally:
        fake_stub.close()


SECOND = 1_000_000_000
PERIOD = 300 * SECOND


def passed_on(counters, *requests):
    """Count requests of (name, end, duration, answer)."""
    for name, now, spent, answer in requests:
        counters.passed_on(name, now, spent, 0, answer)


def test_durations_are_counted_by_their_bounds():
    counters = ModelStatistics("m", 1)
    bounds = counters.duration_bounds
    assert (bounds[0], bounds[1], bounds[-1]) == (10_000, 12_500, 100 * SECOND)
    assert bounds == sorted(set(bounds))
    passed_on(counters, ("", 1, 0, 0), ("", 1, bounds[0], 0), ("", 1, bounds[0], 1))
    passed_on(counters, ("", 1, bounds[-1], 0), ("", 1, bounds[-1], 1))
    assert counters.duration_counts == [(0, 2), (1, 1), (70, 1), (71, 1)]
    assert counters.answer_ns == 2


def test_the_slowest_requests_of_the_last_minutes_are_kept():
    counters = ModelStatistics("m", 1)
    durations = [n * 7919 % 1000 for n in range(1000)]
    passed_on(counters, *((str(n), 1000 * PERIOD, n, 5) for n in durations))
    now = 1000 * PERIOD
    found = counters.slow_requests(now)
    assert sorted(row[2] for row in found) == list(range(980, 1000))
    assert all((row[0], row[-1]) == (str(row[2]), 5) for row in found)
    # A request of the next period, whose answer took long.
    passed_on(counters, ("later", now + PERIOD + 1, 3, 7))
    assert len(counters.slow_requests(now + PERIOD + 1)) == 21
    assert [row[0] for row in counters.slow_requests(now + 2 * PERIOD + 2)] == ["later"]
    assert counters.slow_requests(now + 10 * PERIOD) == []


def test_ids_of_slow_requests_are_shortened(fake_stub):
    requests = [InferRequest(b"", None, 0, (), lambda _: None, "é" * 1000)]
    fake_stub.feed.submit(requests)
    fake_stub.sent += 1
    complete(fake_stub, requests, 0)
    assert [row[0] for row in fake_stub.counters.slow_requests(NOW)] == ["é" * 128]


def test_requests_are_measured_whenever_they_are_answered(fake_stub):
    counters = fake_stub.counters
    (failed,) = enter(fake_stub, 1)
    complete(fake_stub, [failed], ResponseFlag.ERROR)
    assert counters.duration_counts == []
    # Its last response comes before its batch ends, or after.
    (early,) = enter(fake_stub, 1)
    ticket = early.ticket
    fake_stub.respond(record(ticket, ResponseFlag.EMPTY))
    assert counters.duration_counts == []
    fake_stub.complete((fake_stub.sent, [record(ticket, OPEN)]))
    (late,) = enter(fake_stub, 1)
    ticket = late.ticket
    complete(fake_stub, [late], OPEN)
    assert sum(count for _, count in counters.duration_counts) == 1
    fake_stub.respond(record(ticket, ResponseFlag.EMPTY))
    assert sum(count for _, count in counters.duration_counts) == counters.success_count == 2
