"""Which batch of requests a cancellation ends: with that the calls of its model are cancelled."""

import pytest

from gpubridge.transport.control import ABANDONED, CANCELLED
from gpubridge.transport.messages import ResponseFlag
from tests.fuzz.fake_stub import FakeStub, record


@pytest.fixture
def stub():
    stub = FakeStub()
    yield stub
    stub.close()


def cancel(stub, batch, index, how=ABANDONED):
    """Cancel a request; returns its ticket."""
    request = stub.flights[batch][index].request
    stub.in_flight.cancel(request, False, how)
    return request.ticket


def test_a_batch_is_cancelled_with_its_last_request(stub):
    stub.enter(2)
    stub.control.start(1)
    first, second = cancel(stub, 1, 0), cancel(stub, 1, 1)
    assert stub.cancelled == [(first, 0), (second, 1)]


def test_a_request_that_has_not_started_is_not_told(stub):
    stub.enter(1)
    cancel(stub, 1, 0)
    assert not stub.cancelled


def test_requests_of_other_batches_do_not_matter(stub):
    stub.enter(1)
    stub.enter(1)
    stub.control.start(1)
    tickets = [stub.flights[batch][0].request.ticket for batch in (1, 2)]
    stub.complete((1, [record(tickets[0], ResponseFlag.OPEN | ResponseFlag.EMPTY)]))
    stub.control.start(2)
    assert cancel(stub, 2, 0) == tickets[1]
    assert stub.cancelled == [(tickets[1], 2)]
    # One whose batch has ended, while its model still answers.
    assert cancel(stub, 1, 0) == tickets[0]
    assert stub.cancelled[1:] == [(tickets[0], 1)]


def test_open_requests_of_one_batch_are_cancelled_together(stub):
    stub.enter(2)
    stub.control.start(1)
    tickets = [each.request.ticket for each in stub.flights[1]]
    flags = ResponseFlag.OPEN | ResponseFlag.EMPTY
    stub.complete((1, [record(ticket, flags) for ticket in tickets]))
    cancel(stub, 1, 1)
    stub.respond(record(tickets[0], ResponseFlag.EMPTY))
    cancel(stub, 1, 1)
    assert stub.cancelled == [(tickets[1], 0)]


def test_a_request_is_cancelled_once(stub):
    stub.enter(1)
    stub.control.start(1)
    ticket = cancel(stub, 1, 0, CANCELLED)
    cancel(stub, 1, 0)
    assert stub.cancelled == [(ticket, 1)]
    assert stub.control.cancelled[ticket] == 1
