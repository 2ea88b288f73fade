"""Limit of responses in flight, counted over all runs of a rescheduled request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpubridge.request import InferRequest
from gpubridge.stub.response_lines import _WAITING_RESPONSES, _Line
from gpubridge.transport.messages import ResponseFlag
from tests.fuzz.stub_desk import Desk, record


@pytest.fixture
def desk():
    made = Desk()
    yield made
    made.close()


def run(desk, request):
    """Begin a run; returns the sender's end of the request's line."""
    desk.sent += 1
    desk.feed.submit([request])
    stub = SimpleNamespace(control=desk.control, identity=SimpleNamespace(decoupled=True))
    return _Line(stub, SimpleNamespace(ticket=request.ticket))


def room(line):
    """Send as much as may be sent; returns how much that was."""
    return next(count for count in range(2 * _WAITING_RESPONSES) if not line._has_room(1))


def test_what_an_earlier_run_sent_counts_until_it_is_passed_on(desk):
    request = InferRequest(b"", None, 0, (), lambda outcome: None)
    request.on_partial = lambda outcome: None
    line = run(desk, request)
    assert room(line) == _WAITING_RESPONSES
    for _ in range(_WAITING_RESPONSES):
        request.respond("response")
    request.passed_on(10)
    assert room(line) == 10
    for _ in range(10):
        request.respond("response")
    # Between two runs it is nowhere, but its client reads on.
    desk.complete((desk.sent, [record(request.ticket, ResponseFlag.RESCHEDULED)]))
    request.passed_on(4)
    line = run(desk, request)
    assert room(line) == 4
    for _ in range(4):
        request.respond("response")
    request.passed_on(_WAITING_RESPONSES)
    assert room(line) == _WAITING_RESPONSES
