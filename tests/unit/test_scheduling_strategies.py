"""The two strategies of sequence batching, and the controls of each request."""

import pytest

from gpubridge.engine.scheduling.sequence_settings import (
    Control,
    ControlKind,
    DirectStrategy,
    OldestStrategy,
)
from gpubridge.errors import BridgeError
from tests.unit.test_scheduling_sequences import (
    BOTH,
    CONTROLS,
    NOT_STARTED,
    US,
    add,
    direct,
    names,
    oldest,
    run,
    take,
)


def controls(item):
    return {tensor.name: tensor.value for tensor in item.controls}


@BOTH
def test_controls_say_where_in_its_sequence_a_request_stands(make):
    scheduler = make(controls=CONTROLS)
    seen = []
    for flags in ("s", "", "e", "se"):
        add(scheduler, "x", 5, flags)
        (item,) = scheduler.take(0, 0)
        scheduler.answered(item, 0)
        seen.append(controls(item))
    both = {"READY": True, "CORRID": 5}
    assert seen == [
        {"START": 1.0, "END": 0, **both},
        {"START": 0.0, "END": 0, **both},
        {"START": 0.0, "END": 1, **both},
        {"START": 1.0, "END": 1, **both},
    ]
    assert [(t.datatype, t.shape) for t in item.controls] == [
        ("FP32", (1, 1)),
        ("INT32", (1, 1)),
        ("BOOL", (1, 1)),
        ("UINT64", (1, 1)),
    ]


def test_without_a_batch_dimension_controls_have_one_dimension():
    scheduler = oldest(0, strategy=OldestStrategy(), controls=CONTROLS)
    add(scheduler, "x", 5, "s")
    (item,) = scheduler.take(0, 0)
    assert {tensor.shape for tensor in item.controls} == {(1,)}


@pytest.mark.parametrize(
    ("datatype", "given", "value"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 7, 7),
        ("INT32", 2**31, -(2**31)),
        ("BYTES", 7, "7"),
        ("BYTES", "seven", "seven"),
    ],
)
def test_correlation_ids_fit_their_control(datatype, given, value):
    control = Control("C", ControlKind.CONTROL_SEQUENCE_CORRID, datatype)
    scheduler = oldest(controls=(control,))
    add(scheduler, "x", given, "s")
    assert controls(scheduler.take(0, 0)[0]) == {"C": value}


def test_a_sequence_keeps_its_place_and_padding_stands_in_for_others():
    scheduler = direct(3, controls=CONTROLS)
    for number in (1, 2, 3):
        add(scheduler, number, number, "s")
    assert run(scheduler) == [1, 2, 3]
    add(scheduler, "two", 2)
    padding, two = scheduler.take(0, 0)
    assert (padding.request, two.request) == (None, "two")
    assert padding.pattern is two
    assert controls(padding) == {"START": 0.0, "END": 0, "READY": False, "CORRID": 0}
    assert scheduler.answered(padding, 0) == []
    assert scheduler.answered(two, 0) == [two]


def test_an_instance_has_one_direct_batch_at_a_time():
    scheduler = direct(2)
    add(scheduler, "a", 1, "s")
    (item,) = scheduler.take(0, 0)
    add(scheduler, "b", 2, "s")
    assert take(scheduler) is None
    scheduler.answered(item, 0)
    assert take(scheduler) == [None, "b"]


def test_other_shapes_sit_a_batch_out_but_not_for_ever():
    scheduler = direct(2)
    add(scheduler, "a", 1, "s", shape=1)
    add(scheduler, "b", 2, "s", shape=2, now=1)
    add(scheduler, "a2", 1, shape=1, now=2)
    assert run(scheduler, now=3) == ["a"]
    assert run(scheduler, now=3) == [None, "b"]
    assert run(scheduler, now=3) == ["a2"]


def test_direct_waits_for_enough_slots_or_the_delay():
    strategy = DirectStrategy(max_queue_delay_us=100, minimum_slot_utilization=0.5)
    scheduler = direct(4, strategy=strategy)
    add(scheduler, "a", 1, "s")
    assert take(scheduler, now=99 * US) is None
    assert scheduler.next_wakeup(0) == 100 * US
    assert run(scheduler, now=100 * US) == ["a"]
    add(scheduler, "a2", 1, now=200 * US)
    add(scheduler, "b", 2, "s", now=201 * US)
    assert run(scheduler, now=201 * US) == ["a2", "b"]


def test_candidates_may_outnumber_a_batch():
    strategy = OldestStrategy(max_candidate_sequences=3, preferred_batch_sizes=(2,))
    scheduler = oldest(2, strategy=strategy)
    for number in (1, 2, 3, 4):
        add(scheduler, number, number, "s")
    first = scheduler.take(0, 0)
    second = scheduler.take(0, 0)
    assert [names(first), names(second)] == [[1, 2], [3]]
    assert take(scheduler) is None
    add(scheduler, "two", 2, "e")
    assert take(scheduler) is None
    scheduler.answered(first[1], 0)
    assert run(scheduler) == ["two"]
    assert run(scheduler) == [4]


def test_oldest_waits_for_its_delay():
    strategy = OldestStrategy(preferred_batch_sizes=(2,), max_queue_delay_us=100)
    scheduler = oldest(2, strategy=strategy)
    add(scheduler, "a", 1, "s")
    assert take(scheduler, now=100 * US - 1) is None
    assert scheduler.next_wakeup(0) == 100 * US
    assert take(scheduler, now=100 * US) == ["a"]


def test_oldest_can_keep_the_order_of_outcomes_through_a_death():
    strategy = OldestStrategy(
        max_candidate_sequences=2, preferred_batch_sizes=(1,), preserve_ordering=True
    )
    scheduler = oldest(1, strategy=strategy)
    a, b = add(scheduler, "a", 1, "s"), add(scheduler, "b", 2, "s")
    assert [take(scheduler), take(scheduler)] == [["a"], ["b"]]
    assert scheduler.answered(b, 0) == []
    scheduler.instance_died(0, 0)
    assert scheduler.releasable() == [b]
    scheduler.instance_up(0)
    assert scheduler.answered(a, 0) == [a]


@BOTH
def test_a_slot_is_a_sequences_own_until_it_is_over(make):
    scheduler = make(size=2)

    def step(number, flags):
        add(scheduler, "x", number, flags)
        (item,) = [item for item in scheduler.take(0, 0) if item.request]
        scheduler.answered(item, 0)
        return item.slot

    assert [step(5, "s"), step(6, "s"), step(5, ""), step(6, "")] == [0, 1, 0, 1]
    # A START keeps the slot, too: the model hears of it.
    assert [step(5, "s"), step(5, "e"), step(7, "s"), step(6, "")] == [0, 0, 0, 1]


@BOTH
def test_a_rescheduled_request_goes_on_as_its_sequence(make):
    scheduler = make(size=1, iterative=True, controls=CONTROLS)
    a, b = add(scheduler, "a", 0), add(scheduler, "b", 0)
    assert a.correlation_id != b.correlation_id
    seen = []
    for _ in range(3):
        (item,) = scheduler.take(0, 0)
        seen.append((item.request, controls(item)["START"]))
        scheduler.reschedule(item, 0)
    assert seen == [("a", 1.0), ("a", 0.0), ("a", 0.0)]
    assert run(scheduler) == ["a"]
    assert run(scheduler) == ["b"]
    assert scheduler.pending == 0


@BOTH
def test_only_iterative_models_reschedule(make):
    scheduler = make()
    add(scheduler, "a", 5, "s")
    (item,) = scheduler.take(0, 0)
    with pytest.raises(BridgeError, match="iterative_sequence"):
        scheduler.reschedule(item, 0)
    assert scheduler.answered(item, 0) == [item]


@BOTH
def test_items_of_a_dead_instance_cannot_be_rescheduled(make):
    scheduler = make(iterative=True)
    add(scheduler, "a", 5, "s")
    (item,) = scheduler.take(0, 0)
    scheduler.instance_died(0, 0)
    with pytest.raises(BridgeError) as caught:
        scheduler.reschedule(item, 0)
    assert (caught.value.code, caught.value.message) == NOT_STARTED
