"""Duration of a stub's execution, whatever start time it reports itself."""

from types import SimpleNamespace

import pytest

from gpubridge.engine.ipc import stub_connection
from gpubridge.engine.ipc.stub_connection import _ExecuteTimeout

SECOND = 1_000_000_000


@pytest.fixture
def stub(monkeypatch):
    made = SimpleNamespace(started=0, started_at=0, now=100 * SECOND, oldest=0)
    made.holds = lambda sequence: sequence == made.oldest != 0
    clock = SimpleNamespace(monotonic_ns=lambda: made.now)
    monkeypatch.setattr(stub_connection, "time", clock)
    made.watch = _ExecuteTimeout(made, made)
    return made


def begin(stub, sequence, at):
    stub.started, stub.started_at, stub.oldest = sequence, at, sequence


@pytest.mark.parametrize("said", [0, 1, (1 << 64) - 1])
def test_an_execution_is_timed_from_when_it_was_seen(stub, said):
    stub.now += SECOND
    assert stub.watch.overdue(5) is None
    begin(stub, 1, said)
    stub.now += SECOND
    assert stub.watch.overdue(5) is None
    stub.now += 6 * SECOND
    assert stub.watch.overdue(5) == "execute ran"


def test_an_execution_is_timed_from_its_beginning_between_two_looks(stub):
    assert stub.watch.overdue(5) is None
    begin(stub, 1, stub.now + SECOND)
    stub.now += 4 * SECOND
    assert stub.watch.overdue(5) is None
    stub.now += 3 * SECOND
    assert stub.watch.overdue(5) == "execute ran"
    begin(stub, 2, stub.now)
    assert stub.watch.overdue(5) is None


def test_a_stub_that_begins_nothing_is_timed_from_the_first_look(stub):
    stub.oldest = 1
    assert stub.watch.overdue(5) is None
    stub.now += 6 * SECOND
    assert stub.watch.overdue(5) == "no execute began for"


def test_an_execution_is_timed_whatever_else_the_stub_says_to_have_begun(stub):
    begin(stub, 1, stub.now)
    for said in range(6):
        assert stub.watch.overdue(5) is None
        stub.started = stub.started_at = 0x41 + said
        stub.now += SECOND
    assert stub.watch.overdue(5) == "no execute began for"
