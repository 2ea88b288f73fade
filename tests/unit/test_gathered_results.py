"""Results that a dead stub had gathered are taken once, whether it had sent them or not."""

from types import SimpleNamespace

import pytest

from gpubridge.request import InferRequest
from gpubridge.transport.messages import Kind, encode_frame, encode_result_batch, results_message
from tests.fuzz.fake_stub import NOW, FakeStub, record


@pytest.fixture
def fake_stub():
    made = FakeStub()
    made.feed.listen(SimpleNamespace(on_batches=lambda *_: None))
    yield made
    made.close()


@pytest.fixture
def sent(fake_stub):
    """Batches of a request each that are at a stub: their results, and the outcomes so far."""
    outcomes = []
    results = []
    for sequence in (1, 2):
        request = InferRequest(b"", None, 0, (), outcomes.append)
        fake_stub.feed.submit([request])
        results.append(encode_result_batch(sequence, (1, 1, 2), 0, [record(request.ticket)]))
    return results, outcomes


def test_they_are_taken_once(fake_stub, sent):
    results, outcomes = sent
    for _ in range(2):
        fake_stub.in_flight.take_gathered(results_message(2, b"".join(results)))
        assert len(outcomes) == 2
    assert fake_stub.in_flight.oldest == 0


@pytest.mark.parametrize("count", [1, 2])
def test_results_that_came_by_the_channel_are_not_taken_again(fake_stub, sent, count):
    results, outcomes = sent
    fake_stub.in_flight.take(encode_frame(Kind.RESULTS, results[:count]), NOW)
    assert len(outcomes) == count
    fake_stub.in_flight.take_gathered(results_message(count, b"".join(results[:count])))
    assert len(outcomes) == count


@pytest.mark.parametrize("message", [b"", b"\xff" * 64, results_message(3, b"abc")])
def test_bytes_that_are_no_message_are_ignored(fake_stub, sent, message):
    fake_stub.in_flight.take_gathered(message)
    assert sent[1] == []
