"""Batches that are given to an instance before it is free: only where nothing is lost by that."""

from __future__ import annotations

import pytest

from gpubridge.engine.scheduling.settings import QueuePolicy
from tests.unit.model_configs import model_config
from tests.unit.scheduled import default
from tests.unit.test_scheduling_batches import add, dynamic, names, take
from tests.unit.virtual_model import VirtualModel


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
