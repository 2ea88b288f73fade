"""Batches that are counted: whatever becomes of their requests, and places that no request fills."""

from __future__ import annotations

import pytest

from gpubridge.request import InferRequest
from gpubridge.telemetry.statistics import LatencyWindow, ModelStatistics
from gpubridge.transport.messages import Kind, ResponseFlag, encode_frame, encode_result_batch
from tests.fuzz.stub_desk import NOW, Desk, record

OPEN = ResponseFlag.OPEN | ResponseFlag.EMPTY
# Of each request: it is queued until 1, its batch's steps take 1, 1 and the rest.
STEPS = (1, 1, NOW - 3)


@pytest.fixture
def desk():
    made = Desk()
    yield made
    made.close()


def enter(desk, *sizes):
    """Send a batch; returns its requests."""
    requests = []
    for size in sizes:
        requests.append(InferRequest(b"", None, 0, (), lambda _: None, batch_size=size))
        requests[-1].on_partial = lambda _: None
    desk.feed.submit(requests)
    desk.sent += 1
    return requests


def complete(desk, requests, *flags):
    made = [record(one.ticket, flag) for one, flag in zip(requests, flags, strict=True)]
    return desk.complete((desk.sent, made))


def figures(counters):
    return counters.success_count, counters.success_ns, counters.queue_ns, counters.fail_ns


def test_requests_that_succeed_and_fail_in_one_batch(desk):
    requests = enter(desk, 2, 3, 1)
    complete(desk, requests, 0, ResponseFlag.ERROR, ResponseFlag.CANCELLED)
    counters = desk.counters
    assert (counters.inferences, counters.executions) == (2, 1)
    assert figures(counters) == (1, NOW, 1, 2 * NOW)
    assert (counters.input_ns, counters.infer_ns, counters.output_ns) == STEPS
    assert counters.failures == {"OTHER": 0, "BACKEND": 1, "CANCELED": 1, "REJECTED": 0}
    assert counters.batch_rows == {2: (1, *STEPS)}
    assert counters.last_ended_ns == 3


def test_batches_of_one_size_are_one_row(desk):
    for size in (1, 1, 4):
        complete(desk, enter(desk, size), 0)
    assert desk.counters.batch_rows == {1: (2, 2, 2, 2 * STEPS[2]), 4: (1, *STEPS)}
    assert desk.counters.inferences == 6


def test_a_request_that_goes_on_is_counted_when_it_ends(desk):
    going_on, done = enter(desk, 3, 1)
    complete(desk, (going_on, done), OPEN, 0)
    assert desk.counters.batch_rows == {4: (1, *STEPS)}
    assert figures(desk.counters) == (1, NOW, 1, 0)
    assert desk.respond(record(going_on.ticket, ResponseFlag.EMPTY))
    assert figures(desk.counters) == (2, 2 * NOW, 2, 0)
    assert desk.counters.inferences == 4


def test_a_request_that_goes_on_and_fails(desk):
    (going_on,) = enter(desk, 3)
    complete(desk, [going_on], OPEN)
    desk.respond(record(going_on.ticket, ResponseFlag.ERROR))
    assert figures(desk.counters) == (0, 0, 0, NOW)
    assert desk.counters.failures["BACKEND"] == 1


@pytest.mark.parametrize(("flag", "failed"), [(ResponseFlag.EMPTY, 0), (ResponseFlag.ERROR, 1)])
def test_a_request_that_ends_before_its_batch_is_counted_with_it(desk, flag, failed):
    (early,) = enter(desk, 2)
    ticket = early.ticket
    assert not desk.respond(record(ticket, flag))
    assert figures(desk.counters) == (0, 0, 0, 0)
    desk.complete((desk.sent, [record(ticket, OPEN)]))
    assert desk.counters.success_count == 1 - failed
    assert desk.counters.failures["BACKEND"] == failed


def test_a_run_that_is_to_be_repeated_counts_like_any_other(desk):
    requests = enter(desk, 1, 0)
    completed = complete(desk, requests, ResponseFlag.RESCHEDULED, ResponseFlag.RESCHEDULED)
    # Nobody asked for what fills up a batch, whatever the model wants.
    assert completed.returning == requests[:1]
    assert (desk.counters.executions, desk.counters.success_count) == (1, 1)


def test_a_place_that_no_request_fills_may_end_after_its_batch(desk):
    requests = enter(desk, 1, 0)
    complete(desk, requests, OPEN, OPEN)
    for request in reversed(requests):
        desk.respond(record(request.ticket, ResponseFlag.EMPTY))
    assert (desk.counters.inferences, desk.counters.executions) == (1, 1)


def test_durations_of_single_requests_are_kept_where_that_is_wanted():
    statistics = ModelStatistics("m", 1, window=LatencyWindow())
    desk = Desk(statistics)
    try:
        complete(desk, enter(desk, 1, 1), 0, ResponseFlag.ERROR)
        # Microseconds; the last step takes all but three nanoseconds.
        expected = [NOW // 1000, 0, 0, 0, STEPS[2] // 1000]
        assert statistics.window.quantiles((1.0,), now=NOW) == [[us] for us in expected]
        assert list(statistics.window._observations) == [(NOW, (NOW, 1, *STEPS))]
    finally:
        desk.close()


def test_only_what_is_followed_is_told_of_its_batch(desk):
    complete(desk, enter(desk, 1), 0)
    (followed,) = requests = enter(desk, 1)
    followed = InferRequest(b"", None, 0, (), lambda _: None)
    followed.trace = object()
    desk.feed.submit([followed])
    desk.sent += 1
    assert complete(desk, [followed], 0).traced == [(desk.sent, 1, 2, 3, [followed])]
    assert desk.complete((desk.sent - 1, [record(requests[0].ticket)])).traced == []


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
    desk = Desk(ModelStatistics("m", 1, window=LatencyWindow()))
    try:
        request = InferRequest(b"", None, 0, (), lambda _: None)
        request.arrived, request.trace = NOW // 2, object()
        desk.feed.submit([request])
        batch = encode_result_batch(1, times, 0, [record(request.ticket)])
        heard = desk.take(encode_frame(Kind.RESULTS, [batch]))
        (traced,) = heard.traced
        started, called, ended = bounded
        assert (traced.started, traced.called, traced.ended) == bounded
        counters = desk.counters
        assert figures(counters) == (1, NOW - NOW // 2, started - NOW // 2, 0)
        steps = called - started, ended - called, NOW - ended
        assert (counters.input_ns, counters.infer_ns, counters.output_ns) == steps
        assert counters.last_ended_ns == ended
    finally:
        desk.close()
