"""What the server makes of the number of the batch that a stub says to have begun, which its model can write."""

import pytest

from tests.fuzz.fake_stub import FakeStub, record

HUGE = (1 << 64) - 1


@pytest.fixture
def stub():
    """A stub that has answered the first of three batches."""
    made = FakeStub()
    for _ in range(3):
        made.enter(1)
    made.complete((1, [record(made.asked[0].request.ticket)]))
    yield made
    made.close()


def numbers(stub, requests):
    return [stub.asked.index(each) + 1 for each in stub.asked if each.request in requests]


@pytest.mark.parametrize(
    ("said", "executing"), [(1, []), (2, [2]), (3, [2, 3]), (0, []), (4, []), (HUGE, [])]
)
def test_only_a_batch_that_is_at_the_stub_is_known_to_execute(stub, said, executing):
    stub.control.progress[0] = said
    requests = [each.request for each in stub.asked[1:]]
    assert numbers(stub, list(filter(stub.in_flight.executes, requests))) == executing


@pytest.mark.parametrize(
    ("said", "begun"), [(1, []), (2, [2]), (3, [2, 3]), (0, [2, 3]), (HUGE, [2, 3])]
)
def test_a_dead_stubs_requests_are_not_executed_again_unless_they_are_known_not_to_have_begun(
    stub, said, begun
):
    started, unstarted = stub.die(said)
    assert numbers(stub, started) == begun
    assert len(started + unstarted) == 2
