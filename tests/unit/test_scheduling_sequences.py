"""Sequence batching, rule by rule: slots, backlog, controls, states, endings."""

import logging

import pytest

from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_settings import (
    Control,
    ControlKind,
    DirectStrategy,
    OldestStrategy,
    SequenceBatching,
)
from gpubridge.engine.scheduling.sequence_strategies import (
    DirectSequenceScheduler,
    OldestSequenceScheduler,
)
from gpubridge.errors import BridgeError, ErrorCode

US = 1000
IDLE = 3_000_000

CONTROLS = (
    Control("START", ControlKind.CONTROL_SEQUENCE_START, "FP32", 0.0, 1.0),
    Control("END", ControlKind.CONTROL_SEQUENCE_END, "INT32", 0, 1),
    Control("READY", ControlKind.CONTROL_SEQUENCE_READY, "BOOL", False, True),
    Control("CORRID", ControlKind.CONTROL_SEQUENCE_CORRID, "UINT64"),
)


def direct(size=2, instances=1, strategy=None, **settings):
    settings.setdefault("max_sequence_idle_us", IDLE)
    made = SequenceBatching(**settings)
    scheduler = DirectSequenceScheduler(made, strategy or DirectStrategy(), "m", size)
    for instance in range(instances):
        scheduler.instance_up(instance)
    return scheduler


def oldest(size=2, instances=1, strategy=None, **settings):
    settings.setdefault("max_sequence_idle_us", IDLE)
    strategy = strategy or OldestStrategy(preferred_batch_sizes=(size,))
    scheduler = OldestSequenceScheduler(SequenceBatching(**settings), strategy, "m", size)
    for instance in range(instances):
        scheduler.instance_up(instance)
    return scheduler


BOTH = pytest.mark.parametrize("make", [direct, oldest])


def add(scheduler, name, correlation_id, flags="", now=0, **fields):
    item = SequenceItem(name, correlation_id, "s" in flags, "e" in flags, **fields)
    scheduler.add(item, now)
    return item


def names(items):
    return None if items is None else [item.request for item in items]


def take(scheduler, instance=0, now=0):
    return names(scheduler.take(instance, now))


def run(scheduler, instance=0, now=0):
    """Take a batch and answer it."""
    items = scheduler.take(instance, now)
    for item in items or ():
        scheduler.answered(item, now)
    return names(items)


def refused(scheduler, now=0):
    return [(item.request, error.code, error.message) for item, error in scheduler.refused(now)]


def error(scheduler, *request, **fields):
    with pytest.raises(BridgeError) as caught:
        add(scheduler, "refused", *request, **fields)
    return caught.value.code, caught.value.message


NOT_STARTED = (
    ErrorCode.INVALID_ARG,
    (
        "inference request for sequence 5 to model 'm' must specify the START flag on the first "
        "request of the sequence"
    ),
)


@BOTH
def test_refusals_have_tritons_words(make):
    scheduler = make()
    assert error(scheduler, 5) == NOT_STARTED
    assert error(scheduler, 5, "s", size=2)[1] == (
        "inference request to model 'm' must specify batch-size 1 due to requirements of sequence "
        "batcher"
    )
    for nothing in (0, ""):
        assert error(scheduler, nothing, "s")[1] == (
            "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
        )
    assert scheduler.pending == 0


@BOTH
def test_a_sequence_is_over_after_its_end(make):
    scheduler = make()
    for name, flags in (("a", "s"), ("b", ""), ("c", "e")):
        add(scheduler, name, 5, flags)
        assert run(scheduler) == [name]
    assert error(scheduler, 5) == NOT_STARTED
    add(scheduler, "d", 5, "se")
    assert run(scheduler) == ["d"]


@BOTH
def test_ids_may_be_strings(make):
    scheduler = make()
    add(scheduler, "a", "x", "s")
    add(scheduler, "b", "x")
    assert [run(scheduler), run(scheduler)] == [["a"], ["b"]]
    assert "sequence y to model" in error(scheduler, "y")[1]


@BOTH
def test_a_string_id_needs_a_control_that_can_carry_it(make):
    scheduler = make(controls=CONTROLS)
    code, message = error(scheduler, "abc", "s")
    assert code is ErrorCode.INVALID_ARG
    assert "must specify an integer correlation ID" in message


@BOTH
def test_a_start_within_a_sequence_goes_on_in_its_slot(make, caplog):
    scheduler = make(size=1, controls=CONTROLS)
    add(scheduler, "a", 5, "s")
    run(scheduler)
    with caplog.at_level(logging.WARNING):
        add(scheduler, "b", 5, "s")
    assert "sequence 5 for model 'm' has a conflict." in caplog.text
    assert run(scheduler) == ["b"]


@BOTH
def test_sequences_are_spread_over_instances_and_stay_there(make):
    scheduler = make(instances=2)
    for number in (1, 2, 3):
        add(scheduler, number, number, "s")
    assert run(scheduler, 0) == [1, 3]
    assert run(scheduler, 1) == [2]
    for number in (3, 2, 1):
        add(scheduler, number, number)
    assert sorted(run(scheduler, 0)) == [1, 3]
    assert run(scheduler, 1) == [2]


@BOTH
def test_a_sequence_without_a_slot_waits_for_one(make):
    scheduler = make(size=1)
    add(scheduler, "a", 1, "s")
    add(scheduler, "b", 2, "s")
    add(scheduler, "b2", 2, "e")
    add(scheduler, "c", 3, "se")
    assert run(scheduler) == ["a"]
    assert run(scheduler) is None
    add(scheduler, "a2", 1, "e")
    assert [run(scheduler) for _ in range(4)] == [["a2"], ["b"], ["b2"], ["c"]]


@BOTH
def test_a_sequence_without_a_slot_times_out_as_a_whole(make):
    scheduler = make(size=1)
    add(scheduler, "a", 1, "s", timeout_us=1)
    add(scheduler, "b", 2, "s", timeout_us=500)
    add(scheduler, "b2", 2, timeout_us=200)
    add(scheduler, "c", 3, "s")
    assert scheduler.next_wakeup(0) == 200 * US
    run(scheduler)
    text = "timeout of the corresponding sequence has been expired"
    assert refused(scheduler, 200 * US) == [
        ("b", ErrorCode.UNAVAILABLE, text),
        ("b2", ErrorCode.UNAVAILABLE, text),
    ]
    assert "sequence 2 to model" in error(scheduler, 2, now=200 * US)[1]
    add(scheduler, "a2", 1, "e", now=200 * US)
    assert [run(scheduler, now=200 * US) for _ in range(2)] == [["a2"], ["c"]]


@BOTH
def test_an_idle_sequence_gives_its_slot_up(make):
    scheduler = make(size=1)
    add(scheduler, "a", 5, "s")
    (item,) = scheduler.take(0, 0)
    # Neither what is executed for long nor what has requests left is idle.
    assert scheduler.next_wakeup(9 * IDLE * US) is None
    add(scheduler, "b", 2, "s", now=9 * IDLE * US)
    scheduler.answered(item, 10 * IDLE * US)
    assert scheduler.next_wakeup(10 * IDLE * US) == 11 * IDLE * US
    assert take(scheduler, now=11 * IDLE * US - 1) is None
    assert take(scheduler, now=11 * IDLE * US) == ["b"]
    assert error(scheduler, 5, now=11 * IDLE * US) == NOT_STARTED


@BOTH
def test_a_request_in_time_keeps_the_slot(make):
    scheduler = make(size=1)
    add(scheduler, "a", 5, "s")
    run(scheduler)
    for beat in range(1, 4):
        now = beat * (IDLE * US - 1)
        add(scheduler, beat, 5, now=now)
        assert run(scheduler, now=now) == [beat]


@BOTH
def test_after_stop_only_what_began_goes_on(make):
    scheduler = make()
    add(scheduler, "a", 5, "s")
    scheduler.stop()
    assert error(scheduler, 6, "s")[0] is ErrorCode.UNAVAILABLE
    add(scheduler, "b", 5, "e")
    assert [run(scheduler), run(scheduler)] == [["a"], ["b"]]


@BOTH
def test_clear_gives_everything_away_and_ends_all(make):
    scheduler = make(size=1)
    items = [add(scheduler, "a", 5, "s"), add(scheduler, "b", 6, "s"), add(scheduler, "c", 6)]
    assert set(scheduler.clear()) == set(items)
    assert scheduler.pending == 0
    assert take(scheduler) is None
    assert error(scheduler, 5) == NOT_STARTED


@BOTH
def test_a_cancelled_request_ends_its_sequence(make):
    scheduler = make(size=1)
    add(scheduler, "a", 5, "s")
    running = scheduler.take(0, 0)
    b, _ = add(scheduler, "b", 5), add(scheduler, "c", 5)
    add(scheduler, "next", 6, "s")
    assert scheduler.cancel(b)
    assert not scheduler.cancel(b)
    assert [entry[:2] for entry in refused(scheduler)] == [("c", ErrorCode.CANCELLED)]
    assert error(scheduler, 5) == NOT_STARTED
    assert take(scheduler) is None
    assert scheduler.answered(running[0], 0) == running
    assert take(scheduler) == ["next"]


@BOTH
def test_started_items_cannot_be_cancelled(make):
    scheduler = make()
    item = add(scheduler, "a", 5, "s")
    take(scheduler)
    assert not scheduler.cancel(item)


@BOTH
def test_sequences_end_with_their_instance(make):
    scheduler = make()
    add(scheduler, "a", 5, "s")
    add(scheduler, "b", 5)
    (running,) = scheduler.take(0, 0)
    scheduler.instance_died(0, 0)
    ((name, code, message),) = refused(scheduler)
    assert (name, code) == ("b", ErrorCode.UNAVAILABLE)
    assert "sequence 5 to model 'm'" in message
    assert "START" in message
    assert error(scheduler, 5) == NOT_STARTED
    scheduler.instance_up(0)
    assert scheduler.answered(running, 0) == [running]
    add(scheduler, "c", 5, "s")
    add(scheduler, "d", 5)
    assert [run(scheduler), run(scheduler)] == [["c"], ["d"]]


@BOTH
def test_a_sequence_of_which_nothing_was_started_goes_to_another_instance(make):
    scheduler = make(size=1, instances=2)
    add(scheduler, "a", 5, "s")
    add(scheduler, "b", 5)
    add(scheduler, "c", 6, "s")
    orphans = scheduler.take(0, 0)
    scheduler.put_back(orphans)
    scheduler.instance_died(0, 0)
    assert refused(scheduler) == []
    add(scheduler, "c2", 6, "e")
    assert [run(scheduler, 1) for _ in range(4)] == [["c"], ["c2"], ["a"], ["b"]]
    assert take(scheduler, 0) is None


@BOTH
def test_sequences_that_lost_their_slot_come_first(make):
    scheduler = make(size=1)
    add(scheduler, "a", 5, "se")
    add(scheduler, "b", 6, "se")
    scheduler.put_back(scheduler.take(0, 0))
    scheduler.instance_died(0, 0)
    scheduler.instance_up(0)
    assert [run(scheduler), run(scheduler)] == [["a"], ["b"]]


@BOTH
def test_a_dead_instance_takes_only_the_requests_before_the_next_start(make):
    scheduler = make()
    add(scheduler, "a", 5, "s")
    run(scheduler)
    for name, flags in (("b", ""), ("c", "s"), ("d", "e")):
        add(scheduler, name, 5, flags)
    scheduler.instance_died(0, 0)
    assert [entry[0] for entry in refused(scheduler)] == ["b"]
    scheduler.instance_up(0)
    assert [run(scheduler), run(scheduler)] == [["c"], ["d"]]
    assert error(scheduler, 5) == NOT_STARTED
