"""Invariants of sequence batching whatever happens to clients and instances, in virtual time."""

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubridge.engine.scheduling.sequence_item import SequenceItem
from gpubridge.engine.scheduling.sequence_settings import (
    DirectStrategy,
    OldestStrategy,
    SequenceBatching,
)
from gpubridge.engine.scheduling.sequence_strategies import (
    DirectSequenceScheduler,
    OldestSequenceScheduler,
)
from gpubridge.errors import BridgeError
from tests.unit.scheduled import Recorded

US = 1000
IDLE_US = 300


def copied(item):
    return SequenceItem(
        None, item.correlation_id, item.start, item.end, item.shape, item.timeout_us
    )


class SequenceMachine(RuleBasedStateMachine):
    """Clients send sequences, well-formed or not; instances answer, reschedule, die and come back.

    ``previous`` is what was admitted before an item of the same sequence. An item is only ever
    executed when that was answered, by the same life of the same instance.
    """

    def __init__(self):
        super().__init__()
        self.now = 0
        self.queued: list[SequenceItem] = []
        self.flying: list[SequenceItem] = []
        self.answered: set[SequenceItem] = set()
        self.previous: dict[SequenceItem, SequenceItem | None] = {}
        self.last: dict[int, SequenceItem] = {}
        self.home: dict[SequenceItem, tuple[int, int, int]] = {}
        self.again: set[SequenceItem] = set()
        self.up: set[int] = set()
        self.lives = [0, 0]

    @initialize(
        kind=st.sampled_from([DirectSequenceScheduler, OldestSequenceScheduler]),
        size=st.sampled_from([0, 1, 3]),
        delay=st.sampled_from([0, 50]),
        utilization=st.sampled_from([0.0, 0.5, 1.0]),
        candidates=st.sampled_from([0, 2]),
        preferred=st.sampled_from([(), (2,)]),
        iterative=st.booleans(),
    )
    def start(self, kind, size, delay, utilization, candidates, preferred, iterative):
        made = SequenceBatching(max_sequence_idle_us=IDLE_US, iterative=iterative)
        self.direct = kind is DirectSequenceScheduler
        self.most, self.delay, self.iterative = max(size, 1), delay * US, iterative
        if self.direct:
            strategy = DirectStrategy(delay, utilization)
            self.slots = self.most
        else:
            strategy = OldestStrategy(candidates, preferred if size > 1 else (), delay)
            self.slots = candidates or self.most
        self.scheduler = Recorded(lambda: kind(made, strategy, "m", size), copied)
        self.bring_up(0)

    def bring_up(self, instance):
        self.up.add(instance)
        self.lives[instance] += 1
        self.scheduler.instance_up(instance)

    @rule(
        number=st.integers(1, 4),
        flags=st.sampled_from(["", "", "", "s", "e", "se"]),
        follow=st.booleans(),
        shape=st.sampled_from([1, 1, 1, 2]),
        timeout=st.sampled_from([0, 0, 30]),
    )
    def send(self, number, flags, follow, shape, timeout):
        if not follow and "s" not in flags:
            flags += "s"
        item = SequenceItem(None, number, "s" in flags, "e" in flags, shape, timeout)
        refusal = self.refusal_of(self.scheduler.add, item)
        if refusal:
            assert "must specify the START flag" in refusal
            assert "s" not in flags
        else:
            self.previous[item] = None if item.start else self.last[number]
            self.last[number] = item
            self.queued.append(item)
        self.refuse()

    def refusal_of(self, call, item):
        try:
            call(item, self.now)
        except BridgeError as error:
            return error.message
        return None

    @rule(instance=st.integers(0, 1))
    def take(self, instance):
        batch = self.scheduler.take(instance, self.now)
        self.refuse()
        if batch is None:
            return
        assert instance in self.up
        real = [item for item in batch if item.pattern is None]
        assert len(real) > 0
        assert len(batch) <= self.most
        assert batch[-1].pattern is None
        assert len({id(item.sequence) for item in real}) == len(real)
        assert len({item.shape for item in real}) == 1
        for place, item in enumerate(batch):
            if item.pattern is None:
                self.check_taken(item, (instance, self.lives[instance], place))

    def check_taken(self, item, home):
        self.queued.remove(item)
        before = self.home[item] if item in self.again else None
        if before is None and not item.start:
            ancestor = self.previous[item]
            assert ancestor in self.answered
            before = self.home[ancestor]
        if before is not None:
            # Only the direct strategy promises a place.
            assert before == home if self.direct else before[:2] == home[:2]
        self.home[item] = home
        self.flying.append(item)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), again=st.booleans())
    def answer(self, data, again):
        item = data.draw(st.sampled_from(self.flying))
        self.flying.remove(item)
        if again and self.iterative:
            refusal = self.refusal_of(self.scheduler.reschedule, item)
            if not refusal:
                self.again.add(item)
                self.queued.append(item)
                return
            assert "START" in refusal
        assert self.scheduler.answered(item, self.now) == [item]
        self.answered.add(item)

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def cancel(self, data):
        item = data.draw(st.sampled_from(self.queued))
        if self.scheduler.cancel(item):
            self.queued.remove(item)
            assert not self.scheduler.cancel(item)
        self.refuse()
        assert item not in self.queued

    @precondition(lambda self: self.up)
    @rule(data=st.data(), started=st.booleans())
    def die(self, data, started):
        instance = data.draw(st.sampled_from(sorted(self.up)))
        self.up.remove(instance)
        here = [i for i in self.flying if self.home[i][:2] == (instance, self.lives[instance])]
        orphans = [] if started else here
        self.scheduler.put_back(orphans)
        for item in orphans:
            self.flying.remove(item)
            self.queued.append(item)
            if item.start and item not in self.again:
                del self.home[item]
        self.scheduler.instance_died(instance, self.now)
        self.refuse()

    @rule(instance=st.integers(0, 1))
    def come_back(self, instance):
        if instance not in self.up:
            self.bring_up(instance)

    def refuse(self):
        for item, _ in self.scheduler.refused(self.now):
            self.queued.remove(item)

    @rule(step=st.integers(1, 400))
    def pass_time(self, step):
        """Nothing happens by itself before the time that was named, and something at that time."""
        later = self.now + step * US
        wake = self.scheduler.next_wakeup(self.now)
        due = {i for i in self.up if self.scheduler.twin().take(i, self.now)}
        before = later if wake is None else min(wake - 1, later)
        assert not self.news(before, due)
        if wake is not None:
            assert wake > self.now
            if not self.news(wake, due):
                # A sequence that was idle for too long is over.
                assert self.scheduler.twin().next_wakeup(wake) == wake
                assert self.forgets_one(wake)
        self.now = later
        self.refuse()

    def news(self, when, due):
        if self.scheduler.twin().refused(when):
            return True
        return any(self.scheduler.twin().take(i, when) for i in self.up - due)

    def forgets_one(self, when):
        twin = self.scheduler.twin()
        known = len(twin._known)
        twin.refused(when)
        return len(twin._known) < known

    @invariant()
    def counts_and_slots(self):
        if hasattr(self, "scheduler"):
            assert self.scheduler.pending == len(self.queued)
            seats = self.scheduler._assigned
            assert set(seats) == self.up
            for instance, places in seats.items():
                free = [slot for slot, where in self.scheduler._free if where == instance]
                taken = [slot for slot, sequence in enumerate(places) if sequence is not None]
                assert sorted(free + taken) == list(range(self.slots))
            assert not (self.scheduler._free and self.scheduler._backlog)

    def teardown(self):
        """With instances that answer, and clients that send nothing more, everything comes out."""
        if not hasattr(self, "scheduler"):
            return
        self.come_back(0)
        for _ in range(2 * len(self.queued) + len(self.flying) + 4):
            for item in list(self.flying):
                self.flying.remove(item)
                self.scheduler.answered(item, self.now)
                self.answered.add(item)
            self.now += max(self.delay, IDLE_US * US)
            self.refuse()
            for instance in sorted(self.up):
                self.take(instance)
        assert not self.queued
        assert not self.scheduler._known or self.flying


SequenceMachine.TestCase.settings = settings(stateful_step_count=30)
test_sequences = SequenceMachine.TestCase
