"""The default scheduler, the queue's levels and limits, and the dynamic batcher, rule by rule."""

import gc
import weakref

import pytest

from gpubridge.engine.scheduling.settings import DynamicBatching, QueuePolicy, TimeoutAction
from gpubridge.errors import BridgeError, ErrorCode
from tests.unit.scheduled import Request, default, dynamic_scheduler

US = 1000


def dynamic(max_batch_size=8, **settings):
    settings.setdefault("preferred_batch_sizes", (max_batch_size,))
    return dynamic_scheduler(DynamicBatching(**settings), max_batch_size)


def add(scheduler, *names, now=0, **fields):
    items = [Request(name, **fields) for name in names]
    for item in items:
        scheduler.add(item, now)
    return items


def names(items):
    return None if items is None else [item.name for item in items]


def take(scheduler, now=0):
    return names(scheduler.take(0, now))


def refused(scheduler, now):
    return [(item.name, error.message) for item, error in scheduler.refused(now)]


def test_default_gives_one_request_after_the_other_whatever_its_priority_or_timeout():
    scheduler = default()
    add(scheduler, "a", "b", priority=2, timeout_us=1)
    add(scheduler, "c", priority=1)
    assert scheduler.pending == 3
    assert scheduler.next_wakeup(0) is None
    assert [take(scheduler, 10**9) for _ in range(4)] == [["a"], ["b"], ["c"], None]
    assert scheduler.pending == 0


def test_default_cancels_what_was_not_taken_and_only_once():
    scheduler = default()
    a, b, c = add(scheduler, "a", "b", "c")
    assert take(scheduler) == ["a"]
    assert [scheduler.cancel(item) for item in (a, b, b)] == [False, True, False]
    assert scheduler.pending == 1
    assert take(scheduler) == ["c"]
    assert take(scheduler) is None
    assert scheduler.answered(c, 0) == [c]


def test_default_puts_orphans_back_to_the_front_in_order():
    scheduler = default()
    items = add(scheduler, *"abcd")
    for _ in range(3):
        take(scheduler)
    scheduler.put_back(items[1:3])
    assert [take(scheduler) for _ in range(3)] == [["b"], ["c"], ["d"]]


@pytest.mark.parametrize("make", [default, dynamic])
def test_cancelled_requests_are_not_kept(make):
    scheduler = make()
    add(scheduler, "first")
    (item,) = add(scheduler, "second")
    gone = weakref.ref(item)
    assert scheduler.cancel(item)
    del item
    assert gone() is None
    assert scheduler.pending == 1
    assert take(scheduler) == ["first"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_scheduler_that_nobody_needs_is_collected_with_what_its_requests_refer_to(taken):
    scheduler = dynamic(preserve_ordering=True)
    (item,) = add(scheduler, "a")
    if taken:
        take(scheduler)
    item.owner = scheduler
    gone = weakref.ref(item)
    del item, scheduler
    gc.collect()
    assert gone() is None


def test_a_request_is_queued_once():
    scheduler = default()
    (item,) = add(scheduler, "a")
    with pytest.raises(ValueError, match="queued already"):
        scheduler.add(item, 0)
    with pytest.raises(ValueError, match="queued already"):
        scheduler.put_back([item])
    assert [take(scheduler), take(scheduler)] == [["a"], None]


@pytest.mark.parametrize("make", [default, dynamic])
def test_a_stopped_scheduler_takes_nothing_and_gives_out_what_it_has(make):
    scheduler = make()
    add(scheduler, "a")
    scheduler.stop()
    with pytest.raises(BridgeError, match="Server is stopping, scheduler for model has stopped"):
        add(scheduler, "b")
    assert take(scheduler) == ["a"]


@pytest.mark.parametrize("make", [default, dynamic])
def test_clear_gives_everything_away(make):
    scheduler = make()
    a, b, c = add(scheduler, *"abc")
    scheduler.cancel(b)
    assert scheduler.clear() == [a, c]
    assert scheduler.pending == 0
    assert take(scheduler) is None


def test_without_a_delay_a_batch_has_what_is_there_up_to_the_most():
    scheduler = dynamic(4)
    add(scheduler, *"abcdef")
    assert take(scheduler) == list("abcd")
    assert take(scheduler) == list("ef")
    assert take(scheduler) is None


def test_the_largest_preferred_size_within_reach_is_taken():
    scheduler = dynamic(8, preferred_batch_sizes=(4, 6), max_queue_delay_us=100)
    add(scheduler, *"abcdefg")
    assert take(scheduler) == list("abcdef")
    assert take(scheduler) is None
    add(scheduler, *"hij")
    assert take(scheduler) == list("ghij")


def test_a_batch_waits_no_longer_than_the_delay_of_its_oldest():
    scheduler = dynamic(8, preferred_batch_sizes=(4,), max_queue_delay_us=100)
    add(scheduler, "a", now=50 * US)
    add(scheduler, "b", now=120 * US)
    assert scheduler.next_wakeup(120 * US) == 150 * US
    assert take(scheduler, 150 * US - 1) is None
    assert take(scheduler, 150 * US) == ["a", "b"]
    assert scheduler.next_wakeup(150 * US) is None


def test_after_the_delay_a_batch_may_be_larger_than_all_preferred_sizes():
    scheduler = dynamic(8, preferred_batch_sizes=(4,), max_queue_delay_us=100)
    add(scheduler, *"abcdef")
    assert take(scheduler, 100 * US) == list("abcdef")


def test_after_the_delay_a_batch_is_no_larger_than_the_most():
    scheduler = dynamic(4, max_queue_delay_us=100)
    add(scheduler, "a", size=3)
    add(scheduler, "b", size=2)
    assert take(scheduler, 100 * US) == ["a"]


def test_the_oldest_of_a_batch_counts_whatever_goes_before_it():
    scheduler = dynamic(
        8, max_queue_delay_us=100, priority_levels=2, default_priority_level=2
    )  # fmt: skip
    add(scheduler, "old")
    add(scheduler, "high", priority=1, now=50 * US)
    assert scheduler.next_wakeup(50 * US) == 100 * US
    assert take(scheduler, 100 * US) == ["high", "old"]


def test_a_batch_that_cannot_reach_a_preferred_size_goes_at_once():
    scheduler = dynamic(8, preferred_batch_sizes=(4,), max_queue_delay_us=100)
    add(scheduler, "a", "b", size=3)
    assert take(scheduler) == ["a"]
    assert take(scheduler) is None


def test_batch_sizes_of_requests_count():
    scheduler = dynamic(8, max_queue_delay_us=100)
    add(scheduler, "a", "b", size=3)
    assert take(scheduler) is None
    add(scheduler, "c", size=3)
    assert take(scheduler) == ["a", "b"]
    add(scheduler, "d", size=5)
    assert take(scheduler) == ["c", "d"]


def test_without_a_batch_dimension_every_request_is_a_batch():
    scheduler = dynamic(0, preferred_batch_sizes=(), max_queue_delay_us=100)
    add(scheduler, "a", "b")
    assert [take(scheduler) for _ in range(3)] == [["a"], ["b"], None]


def test_only_requests_of_the_same_shape_share_a_batch():
    scheduler = dynamic(8, max_queue_delay_us=100)
    add(scheduler, "a", "b", shape=1)
    assert take(scheduler) is None
    add(scheduler, "c", shape=2)
    assert take(scheduler) == ["a", "b"]
    assert take(scheduler) is None
    add(scheduler, "d", shape=1)
    assert take(scheduler) == ["c"]


def test_a_cancelled_request_leaves_the_batch_that_forms():
    scheduler = dynamic(4, preferred_batch_sizes=(3,), max_queue_delay_us=100)
    a, b = add(scheduler, "a", "b")
    assert take(scheduler) is None
    assert scheduler.cancel(a)
    assert not scheduler.cancel(a)
    add(scheduler, "c")
    assert take(scheduler) is None
    add(scheduler, "d")
    assert take(scheduler) == ["b", "c", "d"]
    assert not scheduler.cancel(b)


def test_orphans_go_to_the_front_and_are_due_since_they_came():
    scheduler = dynamic(4, max_queue_delay_us=100)
    items = add(scheduler, *"abcd")
    assert take(scheduler) == list("abcd")
    add(scheduler, "e", now=50 * US)
    assert take(scheduler, 100 * US) is None
    scheduler.put_back(items[2:])
    assert take(scheduler, 100 * US) == ["c", "d", "e"]


def levels(**more):
    return dynamic(1, priority_levels=3, default_priority_level=2, **more)


def test_a_higher_priority_goes_first_and_an_unknown_one_is_the_default():
    scheduler = levels()
    add(scheduler, "low", priority=3)
    add(scheduler, "unknown", priority=9)
    add(scheduler, "none")
    add(scheduler, "high", priority=1)
    order = [take(scheduler)[0] for _ in range(4)]
    assert order == ["high", "unknown", "none", "low"]


def test_a_higher_priority_gets_into_the_batch_that_forms():
    scheduler = dynamic(
        8, preferred_batch_sizes=(2,), max_queue_delay_us=100, priority_levels=2,
        default_priority_level=2,
    )  # fmt: skip
    add(scheduler, "low")
    assert take(scheduler) is None
    add(scheduler, "high", priority=1)
    assert take(scheduler) == ["high", "low"]


def test_a_higher_priority_of_another_shape_goes_without_the_batch_that_forms():
    scheduler = dynamic(
        8, max_queue_delay_us=100, priority_levels=2, default_priority_level=2
    )  # fmt: skip
    add(scheduler, "a", "b", shape=1)
    assert take(scheduler) is None
    add(scheduler, "high", shape=2, priority=1)
    assert take(scheduler) == ["high"]
    assert take(scheduler) is None


def test_a_full_queue_refuses_with_tritons_words_and_counts_requests_of_its_own_level():
    scheduler = levels(
        default_queue_policy=QueuePolicy(max_queue_size=1),
        priority_queue_policy={1: QueuePolicy(max_queue_size=2)},
    )
    add(scheduler, "a", size=4)
    add(scheduler, "b", "c", priority=1)
    for priority in (0, 1):
        with pytest.raises(BridgeError) as caught:
            add(scheduler, "x", priority=priority, identifier="p9")
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert caught.value.message == "[request id: p9] Exceeds maximum queue size"
    assert scheduler.pending == 3
    take(scheduler)
    add(scheduler, "d", priority=1)


def test_expired_requests_free_their_place_in_the_queue():
    policy = QueuePolicy(default_timeout_us=10, max_queue_size=1)
    scheduler = dynamic(8, default_queue_policy=policy, max_queue_delay_us=100)
    add(scheduler, "a")
    add(scheduler, "b", now=10 * US)
    assert refused(scheduler, 10 * US) == [("a", "Request timeout expired")]
    assert take(scheduler, 110 * US) is None
    assert refused(scheduler, 110 * US) == [("b", "Request timeout expired")]


def test_a_late_request_is_rejected():
    scheduler = dynamic(8, default_queue_policy=QueuePolicy(default_timeout_us=300))
    add(scheduler, "a", now=5)
    assert refused(scheduler, 300 * US) == []
    assert scheduler.next_wakeup(6) == 300 * US + 5
    assert take(scheduler, 300 * US + 5) is None
    assert scheduler.next_wakeup(300 * US + 6) == 300 * US + 6
    assert scheduler.pending == 1
    ((item, error),) = scheduler.refused(300 * US + 6)
    assert (item.name, error.code) == ("a", ErrorCode.UNAVAILABLE)
    assert scheduler.pending == 0


@pytest.mark.parametrize(
    ("default", "override", "asked", "deadline"),
    [
        (300, True, 100, 100),
        (300, True, 500, 300),
        (300, True, 0, 300),
        (300, False, 100, 300),
        (0, True, 100, None),
    ],
)
def test_a_request_may_only_shorten_its_time(default, override, asked, deadline):
    policy = QueuePolicy(default_timeout_us=default, allow_timeout_override=override)
    scheduler = dynamic(8, default_queue_policy=policy)
    add(scheduler, "a", timeout_us=asked)
    assert scheduler.next_wakeup(0) == (None if deadline is None else deadline * US)


def test_a_delayed_request_comes_after_all_others_of_its_level_only():
    policy = QueuePolicy(TimeoutAction.DELAY, default_timeout_us=100)
    scheduler = levels(default_queue_policy=policy)
    add(scheduler, "late")
    add(scheduler, "low", priority=3, now=50 * US)
    add(scheduler, "fresh", now=50 * US)
    order = [take(scheduler, 100 * US)[0] for _ in range(3)]
    assert order == ["fresh", "late", "low"]
    assert refused(scheduler, 10**9) == []


def test_a_delayed_request_keeps_its_place_in_the_queue():
    policy = QueuePolicy(TimeoutAction.DELAY, default_timeout_us=100, max_queue_size=1)
    scheduler = dynamic(1, default_queue_policy=policy)
    add(scheduler, "late")
    with pytest.raises(BridgeError, match="Exceeds maximum queue size"):
        add(scheduler, "next", now=200 * US)


def test_an_orphan_had_its_turn_and_is_never_late():
    scheduler = dynamic(1, default_queue_policy=QueuePolicy(default_timeout_us=100))
    a, _ = add(scheduler, "a", "b")
    take(scheduler)
    scheduler.put_back([a])
    assert refused(scheduler, 200 * US) == [("b", "Request timeout expired")]
    assert take(scheduler, 200 * US) == ["a"]


def test_clients_may_name_any_priority():
    scheduler = dynamic(1, priority_levels=2**64 - 1, default_priority_level=7)
    for priority in (2**64 - 1, 2**63, 5, 0):
        add(scheduler, priority, priority=priority)
    assert [take(scheduler)[0] for _ in range(4)] == [5, 0, 2**63, 2**64 - 1]


def test_times_beyond_all_clocks_are_no_times():
    policy = QueuePolicy(default_timeout_us=2**64 - 1, allow_timeout_override=True)
    scheduler = dynamic(2, default_queue_policy=policy, max_queue_delay_us=2**64 - 1)
    add(scheduler, "a", now=2**61, timeout_us=2**64 - 2)
    assert take(scheduler, 2**62) is None
    assert refused(scheduler, 2**62) == []
    add(scheduler, "b", now=2**62)
    assert take(scheduler, 2**62) == ["a", "b"]


def test_without_preserve_ordering_nothing_waits():
    scheduler = dynamic(1)
    a, b = add(scheduler, *"ab")
    take(scheduler)
    take(scheduler)
    assert not scheduler.wants_answers
    assert scheduler.answered(b, 0) == [b]
    assert scheduler.answered(a, 0) == [a]


def test_an_orphan_keeps_its_place_until_it_is_answered_or_cancelled():
    scheduler = dynamic(1, preserve_ordering=True)
    a, b, c = add(scheduler, *"abc")
    for _ in range(3):
        take(scheduler)
    scheduler.put_back([a])
    assert scheduler.answered(b, 0) == []
    assert take(scheduler) == ["a"]
    scheduler.put_back([a])
    assert scheduler.cancel(a)
    assert scheduler.releasable() == [b]
    assert scheduler.answered(c, 0) == [c]
