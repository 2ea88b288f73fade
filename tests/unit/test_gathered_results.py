"""Results that a dead stub had gathered are taken once, whether it had sent them or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpubridge.request import InferRequest
from gpubridge.transport.messages import Kind, encode_frame, encode_result_batch, results_message
from tests.fuzz.stub_desk import NOW, Desk, record


@pytest.fixture
def desk():
    made = Desk()
    made.feed.listen(SimpleNamespace(on_batches=lambda *_: None))
    yield made
    made.close()


@pytest.fixture
def sent(desk):
    """Batches of a request each that are at a stub: their results, and the outcomes so far."""
    outcomes = []
    results = []
    for sequence in (1, 2):
        request = InferRequest(b"", None, 0, (), outcomes.append)
        desk.feed.submit([request])
        results.append(encode_result_batch(sequence, (1, 1, 2), 0, [record(request.ticket)]))
    return results, outcomes


def test_they_are_taken_once(desk, sent):
    results, outcomes = sent
    for _ in range(2):
        desk.in_flight.take_gathered(results_message(2, b"".join(results)))
        assert len(outcomes) == 2
    assert desk.in_flight.idle


@pytest.mark.parametrize("count", [1, 2])
def test_what_came_by_the_channel_is_not_taken_again(desk, sent, count):
    results, outcomes = sent
    desk.in_flight.take(encode_frame(Kind.RESULTS, results[:count]), NOW)
    assert len(outcomes) == count
    desk.in_flight.take_gathered(results_message(count, b"".join(results[:count])))
    assert len(outcomes) == count


@pytest.mark.parametrize("message", [b"", b"\xff" * 64, results_message(3, b"abc")])
def test_what_is_no_message_is_nothing(desk, sent, message):
    desk.in_flight.take_gathered(message)
    assert sent[1] == []
