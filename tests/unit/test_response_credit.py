"""How many responses may be on the way: counted over all the runs of a rescheduled request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpubridge.engine.ledger import Ledger
from gpubridge.host_shm import Segment
from gpubridge.request import InferRequest
from gpubridge.stub.response_lines import _WAITING_RESPONSES, _Line
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory


@pytest.fixture
def control():
    page = ControlPage(Segment.create(0, ControlPage.SIZE))
    yield page
    page.close()


@pytest.fixture
def ledger(control):
    borrowed = BorrowedMemory(control.outputs)
    yield Ledger(control, SimpleNamespace(free=lambda slot: None), borrowed)
    borrowed.close()


def run(ledger, request, control):
    """Begin a run; returns the sender's end of the request's line."""
    ledger.enter(
        1, [request], SimpleNamespace(passed_on=lambda r, n: ledger.passed_on(r.ticket, n))
    )
    desk = SimpleNamespace(control=control, identity=SimpleNamespace(decoupled=True))
    return _Line(desk, SimpleNamespace(ticket=request.ticket))


def room(line):
    """Send as much as may be sent; returns how much that was."""
    return next(count for count in range(2 * _WAITING_RESPONSES) if not line._has_room(1))


def test_what_an_earlier_run_sent_counts_until_it_is_passed_on(ledger, control):
    request = InferRequest(b"", None, 0, (), lambda outcome: None)
    request.on_partial = lambda outcome: None
    line = run(ledger, request, control)
    assert room(line) == _WAITING_RESPONSES
    for _ in range(_WAITING_RESPONSES):
        request.respond("response")
    request.passed_on(10)
    assert room(line) == 10
    for _ in range(10):
        request.respond("response")
    # Between two runs it is nowhere, but its client reads on.
    ledger._come_back(request, request.ticket)
    request.passed_on(4)
    line = run(ledger, request, control)
    assert room(line) == 4
    for _ in range(4):
        request.respond("response")
    request.passed_on(_WAITING_RESPONSES)
    assert room(line) == _WAITING_RESPONSES
