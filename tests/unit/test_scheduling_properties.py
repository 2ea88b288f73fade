"""Invariants of the default scheduler and the dynamic batcher, in virtual time."""

from hypothesis import HealthCheck, assume, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubridge.engine.scheduling.settings import DynamicBatching, QueuePolicy, TimeoutAction
from gpubridge.errors import BridgeError
from tests.unit.scheduled import Recorded, Request, default, dynamic_scheduler

US = 1000

policies = st.builds(
    QueuePolicy,
    timeout_action=st.sampled_from(TimeoutAction),
    default_timeout_us=st.sampled_from([0, 0, 20, 100]),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.sampled_from([0, 0, 3]),
)


class BatchingMachine(RuleBasedStateMachine):
    """Requests come, time passes, instances take and answer, or give back what they never started."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.queued: list[Request] = []
        self.given_back: set[Request] = set()
        self.batches: list[list[Request]] = []
        self.taken_order: list[Request] = []
        self.released: list[Request] = []
        self.answers = 0

    @initialize(
        kind=st.sampled_from(["default", "dynamic", "dynamic", "ordered"]),
        most=st.sampled_from([0, 1, 4, 8]),
        preferred=st.sets(st.integers(1, 8), max_size=3),
        delay=st.sampled_from([0, 0, 50]),
        levels=st.sampled_from([0, 0, 3]),
        policy=policies,
        first=policies,
    )
    def start(self, kind, most, preferred, delay, levels, policy, first):
        self.kind, self.most, self.delay = kind, max(most, 1), delay * US
        ordered = kind == "ordered"
        self.levels = 0 if ordered else levels
        if ordered or kind == "default":
            policy = first = QueuePolicy(max_queue_size=policy.max_queue_size)
        self.policies = dict.fromkeys((0, 1, 2, 3), policy)
        if self.levels:
            self.policies[1] = first
        if kind == "default":
            self.scheduler = Recorded(default, Request.copy)
            self.most, self.delay, self.levels = 10**9, 0, 0
            self.policies = dict.fromkeys((0, 1, 2, 3), QueuePolicy())
            return
        made = DynamicBatching(
            preferred_batch_sizes=tuple(sorted(size for size in preferred if size <= most)),
            max_queue_delay_us=delay,
            preserve_ordering=ordered,
            priority_levels=self.levels,
            default_priority_level=2 if self.levels else 0,
            default_queue_policy=policy,
            priority_queue_policy={1: first} if self.levels else {},
        )
        self.scheduler = Recorded(lambda: dynamic_scheduler(made, most), Request.copy)

    def level(self, item):
        if not self.levels:
            return 0
        priority = item.options.priority
        return priority if 1 <= priority <= self.levels else 2

    @rule(
        size=st.integers(1, 3),
        shape=st.sampled_from([1, 1, 2]),
        priority=st.integers(0, 4),
        timeout=st.sampled_from([0, 5, 200]),
    )
    def arrive(self, size, shape, priority, timeout):
        item = Request(None, min(size, self.most), shape, priority, timeout)
        limit = self.policies[self.level(item)].max_queue_size
        try:
            self.scheduler.add(item, self.now)
        except BridgeError:
            self.refuse()
            level = self.level(item)
            assert limit
            assert sum(self.level(other) == level for other in self.queued) >= limit
            return
        self.refuse()
        self.queued.append(item)
        fresh = [i for i in self.queued if i not in self.given_back]
        if limit and len(fresh) == len(self.queued):
            assert sum(self.level(i) == self.level(item) for i in fresh) <= limit

    @rule()
    def take(self):
        items = self.scheduler.take(0, self.now)
        self.refuse()
        if items is None:
            return
        assert items
        for item in items:
            self.queued.remove(item)
        assert len(items) == 1 or sum(item.batch_size for item in items) <= self.most
        assert len({item.shape for item in items}) == 1
        if self.kind == "default":
            assert len(items) == 1
        self.batches.append(items)
        self.taken_order += [item for item in items if item not in self.taken_order]

    def refuse(self):
        for item, error in self.scheduler.refused(self.now):
            self.queued.remove(item)
            policy = self.policies[self.level(item)]
            assert error.message == "Request timeout expired"
            assert policy.timeout_action is TimeoutAction.REJECT
            assert item not in self.given_back
            limit = policy.default_timeout_us
            if policy.allow_timeout_override and item.options.timeout_us:
                limit = min(limit, item.options.timeout_us)
            assert self.now - item.arrived >= limit * US > 0
        self.release(self.scheduler.releasable())

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def cancel(self, data):
        item = data.draw(st.sampled_from(self.queued))
        self.refuse()
        assume(item in self.queued)
        assert self.scheduler.cancel(item)
        assert not self.scheduler.cancel(item)
        self.queued.remove(item)
        if item in self.taken_order:
            self.taken_order.remove(item)
        self.release(self.scheduler.releasable())

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def answer(self, data):
        batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        for item in batch:
            assert not self.scheduler.cancel(item)
            self.release(self.scheduler.answered(item, self.now))
            self.answers += 1

    @precondition(lambda self: self.batches)
    @rule()
    def give_back(self):
        batch = self.batches.pop()
        self.scheduler.put_back(batch)
        self.queued += batch
        self.given_back.update(batch)

    def release(self, items):
        self.released += items
        if self.kind == "ordered":
            assert self.released == self.taken_order[: len(self.released)]

    @rule(step=st.integers(1, 80))
    def pass_time(self, step):
        """Nothing becomes due before the time that was named, and something does at that time."""
        wake = self.scheduler.next_wakeup(self.now)
        later = self.now + step * US
        if wake is not None:
            assert wake >= self.now
            before = min(wake - 1, later)
        else:
            before = later
        due_now = self.probe_due()
        if before >= self.now:
            assert self.probe(before, due_now) is False, "something was due without an announcement"
        if wake is not None and not due_now:
            assert self.probe(wake, due_now), "woken for nothing"
        self.now = later
        self.refuse()

    def probe_due(self):
        return self.scheduler.twin().take(0, self.now) is not None

    def probe(self, when, due_now):
        """Return whether a twin has anything to give at a time, other than what is due already."""
        twin = self.scheduler.twin()
        news = bool(twin.refused(when))
        if not due_now:
            news = news or twin.take(0, when) is not None
        if not news and not due_now:
            # A DELAY changes the order without anybody getting anything.
            news = twin.next_wakeup(when) != self.scheduler.next_wakeup(when)
        return news

    @invariant()
    def counts(self):
        if hasattr(self, "scheduler"):
            assert self.scheduler.pending == len(self.queued)

    @invariant()
    def no_batch_is_held_longer_than_the_delay(self):
        if self.queued and not self.levels:
            oldest = min(item.arrived for item in self.queued)
            if self.now - oldest >= self.delay:
                twin = self.scheduler.twin()
                late = len(twin.refused(self.now))
                assert late or twin.take(0, self.now) is not None

    def teardown(self):
        """Drained by a free instance, everything comes out."""
        if not hasattr(self, "scheduler"):
            return
        while self.batches:
            for item in self.batches.pop(0):
                self.release(self.scheduler.answered(item, self.now))
        for _ in range(len(self.queued)):
            self.now += self.delay
            self.take()
        assert not self.queued
        for item in [item for batch in self.batches for item in batch]:
            self.release(self.scheduler.answered(item, self.now))
        if self.kind == "ordered":
            assert self.released == self.taken_order


BatchingMachine.TestCase.settings = settings(
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
test_batching = BatchingMachine.TestCase
