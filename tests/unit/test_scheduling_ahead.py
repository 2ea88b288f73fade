"""Batches that are given to an instance before it is free: only where nothing is lost by that."""

from types import SimpleNamespace

import pytest

from gpubridge.dataplane import InferRequest, ModelCounters, RequestDispatch, TraceSampling
from gpubridge.engine.scheduling.settings import QueuePolicy
from gpubridge.host_shm import Segment
from gpubridge.request import NO_BYTES, MemoryRange
from tests.unit.model_configs import model_config
from tests.unit.scheduled import default
from tests.unit.test_scheduling_batches import add, dynamic, names, take
from tests.unit.virtual_model import REGION, VirtualModel

HOST = MemoryRange(Segment.create(REGION, 64), 0, 8, None)


def take_ahead(scheduler, now=0):
    return names(scheduler.take_ahead(0, now))


def test_default_gives_its_requests_ahead():
    scheduler = default()
    add(scheduler, "a", "b")
    assert [take_ahead(scheduler) for _ in range(3)] == [["a"], ["b"], None]


def test_dynamic_gives_a_batch_ahead_that_nothing_can_join():
    scheduler = dynamic(2)
    add(scheduler, "a")
    # It is due, for an instance that is free.
    assert take_ahead(scheduler, now=10**9) is None
    add(scheduler, "b", "c")
    assert [take_ahead(scheduler) for _ in range(2)] == [["a", "b"], None]
    add(scheduler, "d", shape=2)
    assert [take_ahead(scheduler) for _ in range(2)] == [["c"], None]
    assert take(scheduler, now=10**9) == ["d"]


@pytest.mark.parametrize(
    "settings",
    [
        {"priority_levels": 2, "default_priority_level": 1},
        {"default_queue_policy": QueuePolicy(max_queue_size=4)},
        {"default_queue_policy": QueuePolicy(default_timeout_us=1000)},
    ],
)
def test_dynamic_gives_nothing_ahead_where_it_matters_what_still_waits(settings):
    scheduler = dynamic(2, **settings)
    add(scheduler, "a", "b")
    assert take_ahead(scheduler) is None
    assert take(scheduler) == ["a", "b"]


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 2 }"])
def test_nothing_of_a_sequence_is_given_ahead(strategy):
    config = model_config("IN FP32 [-1]", more=f"sequence_batching {{ {strategy} }}")
    model = VirtualModel(config, instances=1, window=3)
    (instance,) = model.instances
    instance.come_up()
    for place in range(3):
        model.submit(number=1, start=place == 0)
    assert len(instance.batches) == 1
    instance.land()
    assert len(instance.batches) == 1
    model.close()


def quick_model(instances=2, window=64, claims=True, processors=64):
    """A model whose instances are up, and known to execute a request in 1 ms / ``window``."""
    model = VirtualModel(model_config("IN FP32 [-1]"), instances, window, processors)
    for instance in model.instances:
        instance.claims = claims
        instance.come_up()
    for _ in model.instances:
        model.submit()
    for instance in model.instances:
        instance.land()
    return model


def counts(model):
    return [len(instance.batches) for instance in model.instances]


def test_quick_requests_go_to_an_instance_that_is_awake_until_another_would_be():
    model = quick_model(instances=3)
    model.submit()
    # Whichever is at work has them, not the next.
    seen = []
    for _ in range(6):
        model.submit()
        seen.append(counts(model))
    assert seen == [[2, 0, 0], [3, 0, 0], [4, 0, 0], [4, 1, 0], [4, 2, 0], [4, 3, 0]]
    model.close()


def test_quick_requests_stay_together_for_longer_where_there_is_no_processor_for_another():
    model = quick_model(processors=2)
    for _ in range(13):
        model.submit()
    assert counts(model) == [13, 0]
    model.submit()
    assert counts(model) == [13, 1]
    model.close()


def test_processors_are_those_of_all_models():
    model, other = quick_model(processors=3), quick_model(instances=1)
    other.turn = model.turn
    other.instances[0].die(hopeless=False)
    other.instances[0].come_up()
    # The other model's instance is at work, too.
    other.submit()
    for _ in range(6):
        model.submit()
    assert counts(model) == [6, 0]
    # Its work is lost with it.
    other.instances[0].die(hopeless=True)
    model.submit()
    assert counts(model) == [6, 1]
    model.close()
    other.close()


@pytest.mark.parametrize(("window", "claims"), [(10, True), (64, False)])
def test_requests_are_spread_where_they_take_long_or_cannot_be_withdrawn(window, claims):
    model = quick_model(window=window, claims=claims)
    clients = [model.submit() for _ in range(4)]
    assert counts(model) == [2, 2]
    model.instances[0].start()
    model.instances[1].start()
    model.instances[1].land()
    model.advance(10**9)
    # What waits behind the other can be withdrawn, or not.
    assert counts(model) == ([2, 2] if claims else [2, 1])
    assert len(clients[1].outcomes) == 1
    model.close()


def test_requests_behind_a_long_one_go_to_others():
    model = quick_model()
    slow, *waiting = [model.submit() for _ in range(3)]
    first, second = model.instances
    assert counts(model) == [3, 0]
    first.start()
    model.advance(10**8)
    assert len(second.batches) == 2
    # Nothing new waits there, either.
    waiting.append(model.submit())
    assert len(second.batches) == 3
    while second.batches:
        second.land()
    assert [len(client.outcomes) for client in (slow, *waiting)] == [0, 1, 1, 1]
    first.land()
    first.start()
    assert not first.batches
    assert len(slow.outcomes) == 1
    assert model.dispatcher.pending == 0
    # It is an instance like any other again.
    assert first.requests.free_tickets == second.requests.free_tickets
    model.submit()
    assert counts(model) == [1, 0]
    model.close()


def test_nothing_is_withdrawn_of_what_a_stub_has_begun():
    model = quick_model()
    clients = [model.submit() for _ in range(3)]
    first, _ = model.instances
    # It has executed some of it, and has not sent the results yet.
    first.control.claimed[0] += len(first.batches)
    for execution in first.batches:
        execution.started = True
    model.advance(10**8)
    assert counts(model) == [3, 0]
    while first.batches:
        first.land()
    assert [len(client.outcomes) for client in clients] == [1, 1, 1]
    model.close()


def test_a_withdrawn_request_has_its_memory_whomever_a_stub_has_handed_that_on_to():
    model = quick_model()
    slow, lied, other = [model.submit() for _ in range(3)]
    first, second = model.instances
    first.start()
    # By a call, before it has begun the request.
    first.requests.find((REGION.region, 0, 64, first.tickets[lied.request]))
    model.advance(10**8)
    assert not lied.slot_freed
    while second.batches:
        second.land()
    assert lied.slot_freed
    first.die(hopeless=False)
    assert [len(client.outcomes) for client in (slow, lied, other)] == [1, 1, 1]
    model.close()


def test_requests_stay_if_no_instance_makes_progress():
    model = quick_model()
    for _ in range(8):
        model.submit()
    for instance in model.instances:
        instance.start()
    before = counts(model)
    model.advance(10**9)
    assert counts(model) == before
    # One has: it gets the others' work, too.
    model.instances[1].land()
    model.instances[1].start()
    model.advance(10**8)
    assert len(model.instances[1].batches) > before[1]
    model.close()


class GoingOn(VirtualModel):
    """Its clock goes on whenever it is looked at."""

    @property
    def now(self):
        self._now += 1
        return self._now

    @now.setter
    def now(self, now):
        self._now = now


@pytest.mark.parametrize(("timeout", "late"), [(5, True), (11_000_000_000, False), (0, False)])
def test_a_request_that_gets_to_no_model_in_time_is_late_at_an_idle_one(timeout, late):
    policy = "default_timeout_microseconds: 20000000000000 allow_timeout_override: true"
    more = f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"
    model = GoingOn(model_config("IN FP32 [-1]", more=more), instances=1)
    model.instances[0].come_up()
    client = model.submit(timeout_us=timeout)
    assert [error.message for error in client.outcomes] == ["Request timeout expired"] * late
    model.close()


@pytest.mark.parametrize(
    ("ranges", "client", "asks"),
    [
        (None, None, False),
        ([], None, False),
        ([HOST, NO_BYTES], None, False),
        ([HOST, HOST._replace(segment="of a GPU")], None, True),
        ([HOST], "a client", True),
    ],
)
def test_requests_in_memory_that_is_on_the_host_are_queued_unasked(ranges, client, asks):
    asked = []
    owner = SimpleNamespace(cancel=None, refuse_unservable=lambda: None)
    dispatch = RequestDispatch(owner, default().batcher, True, False, ModelCounters(), None, None)
    sampling = TraceSampling()
    dispatch.prepare_with(lambda *its: bool(asked.append(its)), sampling, "untraced", False)
    request = InferRequest(b"", None, 0, [], print)
    request.ranges, request.client = ranges, client
    dispatch.submit(request, "untraced")
    assert (asked, dispatch.pending) == ([(request, "untraced")] * asks, not asks)
