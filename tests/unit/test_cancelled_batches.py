"""Which batch of requests a cancellation ends: with that the calls of its model are cancelled."""

from gpubridge.transport.control import ABANDONED, CANCELLED
from gpubridge.transport.messages import ResponseFlag
from tests.fuzz.fake_stub import record


def cancel(fake_stub, batch, index, how=ABANDONED):
    """Cancel a request; returns its ticket."""
    request = fake_stub.flights[batch][index].request
    fake_stub.in_flight.cancel(request, False, how)
    return request.ticket


def test_a_batch_is_cancelled_with_its_last_request(fake_stub):
    fake_stub.enter(2)
    fake_stub.control.start(1)
    first, second = cancel(fake_stub, 1, 0), cancel(fake_stub, 1, 1)
    assert fake_stub.cancelled == [(first, 0), (second, 1)]


def test_a_request_that_has_not_started_is_not_told(fake_stub):
    fake_stub.enter(1)
    cancel(fake_stub, 1, 0)
    assert not fake_stub.cancelled


def test_requests_of_other_batches_do_not_matter(fake_stub):
    fake_stub.enter(1)
    fake_stub.enter(1)
    fake_stub.control.start(1)
    tickets = [fake_stub.flights[batch][0].request.ticket for batch in (1, 2)]
    fake_stub.complete((1, [record(tickets[0], ResponseFlag.OPEN | ResponseFlag.EMPTY)]))
    fake_stub.control.start(2)
    assert cancel(fake_stub, 2, 0) == tickets[1]
    assert fake_stub.cancelled == [(tickets[1], 2)]
    # One whose batch has ended, while its model still answers.
    assert cancel(fake_stub, 1, 0) == tickets[0]
    assert fake_stub.cancelled[1:] == [(tickets[0], 1)]


def test_open_requests_of_one_batch_are_cancelled_together(fake_stub):
    fake_stub.enter(2)
    fake_stub.control.start(1)
    tickets = [each.request.ticket for each in fake_stub.flights[1]]
    flags = ResponseFlag.OPEN | ResponseFlag.EMPTY
    fake_stub.complete((1, [record(ticket, flags) for ticket in tickets]))
    cancel(fake_stub, 1, 1)
    fake_stub.respond(record(tickets[0], ResponseFlag.EMPTY))
    cancel(fake_stub, 1, 1)
    assert fake_stub.cancelled == [(tickets[1], 0)]


def test_a_request_is_cancelled_once(fake_stub):
    fake_stub.enter(1)
    fake_stub.control.start(1)
    ticket = cancel(fake_stub, 1, 0, CANCELLED)
    cancel(fake_stub, 1, 0)
    assert fake_stub.cancelled == [(ticket, 1)]
    assert fake_stub.control.cancelled[ticket] == 1
