"""Invariants of every request of a model, whatever clients, clocks and processes do."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubridge.engine.scheduling.settings import parse_dynamic_batching
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.transport.control import TICKETS
from tests.unit.model_configs import model_config
from tests.unit.virtual_model import REGION, VirtualModel

pytestmark = pytest.mark.slow

US = 1000
TICKET_COUNTS = st.sampled_from([TICKETS, TICKETS, 5, 4])
FEWER_THAN_CANDIDATES = 2
IDLE_US = 400

QUEUE = "default_queue_policy { %s }"
LEVELS = "priority_levels: 3 default_priority_level: 2"
STRICT = "priority_queue_policy { key: 1 value { max_queue_size: 2 } }"
DYNAMIC = {
    "plain": "",
    "delay": "max_queue_delay_microseconds: 50",
    "preferred": "preferred_batch_size: [2, 3] max_queue_delay_microseconds: 50",
    "short": QUEUE % "max_queue_size: 3",
    "late": QUEUE % "default_timeout_microseconds: 40 allow_timeout_override: true",
    "delayed": QUEUE % "default_timeout_microseconds: 40 timeout_action: DELAY",
    "levels": f"{LEVELS} {STRICT} max_queue_delay_microseconds: 20",
    "ordered": "preserve_ordering: true preferred_batch_size: [2]",
}
SEQUENCES = {
    "direct": "direct { }",
    "direct delay": "direct { max_queue_delay_microseconds: 50 minimum_slot_utilization: 0.7 }",
    "oldest": "oldest { max_candidate_sequences: 2 }",
    "oldest delay": (
        "oldest { max_candidate_sequences: 3 preferred_batch_size: [2] "
        "max_queue_delay_microseconds: 50 }"
    ),
    "oldest ordered": "oldest { max_candidate_sequences: 3 preserve_ordering: true }",
}


def make_config(kind):
    if kind == "default":
        more = "max_batch_size: 4"
    elif kind in DYNAMIC:
        more = f"max_batch_size: 4\ndynamic_batching {{ {DYNAMIC[kind]} }}"
    else:
        name, _, iterative = kind.partition(" iterative")
        more = (
            f"max_batch_size: 3\nsequence_batching {{ {SEQUENCES[name]}\n"
            f"max_sequence_idle_microseconds: {IDLE_US}\n"
            f"iterative_sequence: {str(iterative != '').lower()} }}"
        )
        return model_config("IN FP32 [-1]", more=more.replace("iterative_sequence: false", ""))
    return model_config("IN FP32 [-1]", more=more)


def works(instance):
    return bool(instance.batches)


def has_open(instance):
    return bool(instance.open)


def is_ready(instance):
    return instance.state is InstanceState.READY


def is_down(instance):
    return instance.state is not InstanceState.READY


def is_restarting(instance):
    return instance.state is InstanceState.RESTARTING


def on_any(condition):
    return precondition(lambda self: any(map(condition, self.model.instances)))


class ModelMachine(RuleBasedStateMachine):
    """Requests come and are cancelled, time passes, batches end well or not, processes die."""

    def __init__(self):
        super().__init__()
        self.model = None
        self.stopped = False
        self.put_back = False

    def start(self, kind, instances, window, tickets):
        self.kind = kind
        self.sequences = kind.split(" iterative")[0] in SEQUENCES
        config = make_config(kind)
        self.policy = (
            parse_dynamic_batching("m", config.message.dynamic_batching)
            if kind in DYNAMIC
            else None
        )
        self.model = VirtualModel(config, instances, window, tickets=tickets)
        self.model.instances[0].come_up()

    def teardown(self):
        if self.model is None:
            return
        try:
            self.settle()
        finally:
            self.model.close()

    # -- clients ---

    @rule(
        size=st.integers(1, 3),
        shape=st.sampled_from([(1,), (1,), (2,)]),
        priority=st.integers(0, 4),
        timeout=st.sampled_from([0, 0, 10, 90]),
        number=st.integers(1, 4),
        start=st.sampled_from([False, False, True]),
        end=st.sampled_from([False, False, True]),
        chain=st.sampled_from([False, False, True]),
    )
    def send(self, size, shape, priority, timeout, number, start, end, chain):
        if self.sequences:
            start = start or number not in self.model.known
            client = self.model.submit(1, number, start, end, shape, timeout_us=timeout)
        else:
            client = self.model.submit(size, shape=shape, priority=priority, timeout_us=timeout)
        if chain and client.waits:
            # As a model that calls another does: a request is sent when an outcome comes.
            self.model.on_outcome = self.send_another

    @rule(count=st.integers(2, 5), start=st.booleans(), end=st.booleans())
    def send_many(self, count, start, end):
        """So many that some meet in a batch."""
        for number in range(1, count + 1):
            if self.sequences:
                begins = start or number not in self.model.known
                self.model.submit(1, number, begins, end)
            else:
                self.model.submit(1)

    def send_another(self, _):
        self.model.on_outcome = None
        if self.sequences:
            self.model.submit(1, 9, True, True)
        else:
            self.model.submit(1)

    @precondition(lambda self: any(client.waits for client in self.model.clients.values()))
    @rule(data=st.data())
    def cancel(self, data):
        waiting = [client for client in self.model.clients.values() if client.waits]
        self.model.cancel(data.draw(st.sampled_from(waiting)))

    # -- instances ---

    def some(self, data, condition):
        return data.draw(st.sampled_from([i for i in self.model.instances if condition(i)]))

    @on_any(works)
    @rule(data=st.data())
    def execute(self, data):
        self.some(data, works).start()

    @on_any(works)
    @rule(
        data=st.data(),
        failing=st.sets(st.integers(0, 2), max_size=1),
        again=st.sets(st.integers(0, 2), max_size=2),
        going_on=st.sets(st.integers(0, 2), max_size=2),
    )
    def land(self, data, failing, again, going_on):
        self.some(data, works).land(failing, again - failing, going_on)

    @on_any(works)
    @rule(data=st.data())
    def land_in_part(self, data):
        """The first request of a batch lasts longer than the others."""
        self.some(data, works).land(going_on={0})

    @on_any(works)
    @rule(data=st.data())
    def hand_on(self, data):
        """A call names the memory of requests, whether their batch was begun or not."""
        instance = self.some(data, works)
        execution = data.draw(st.sampled_from(instance.batches))
        for request, ticket in zip(execution.requests, execution.tickets, strict=True):
            # Not what was withdrawn, if it has come back in another batch, nor what fills up a batch.
            is_there = request.instance is instance.requests and request.ticket == ticket
            if is_there and request.batch_size:
                instance.requests.find((REGION.region, 0, 64, ticket))

    @on_any(has_open)
    @rule(data=st.data())
    def close_open(self, data):
        instance = self.some(data, has_open)
        instance.close_open(data.draw(st.sampled_from(instance.open)))

    @on_any(is_ready)
    @rule(data=st.data(), hopeless=st.booleans())
    def die(self, data, hopeless):
        self.put_back = True
        self.some(data, is_ready).die(hopeless)

    @on_any(is_down)
    @rule(data=st.data())
    def come_up(self, data):
        self.some(data, is_down).come_up()

    @on_any(is_restarting)
    @rule(data=st.data())
    def give_up(self, data):
        self.some(data, is_restarting).state = InstanceState.FAILED
        self.model.dispatcher.dispatch()

    # -- time ---

    @rule(step=st.one_of(st.integers(1, 500), st.just(10_000)))
    def pass_time(self, step):
        self.model.advance(step * US)

    @precondition(lambda self: not self.stopped)
    @rule(sure=st.sampled_from([False] * 15 + [True]))
    def stop(self, sure):
        if sure:
            self.stopped = True
            self.model.stop()

    # -- what always holds ---

    def flying(self):
        instances = self.model.instances
        batches = [execution for instance in instances for execution in instance.batches]
        return {r for e in batches for r in e.requests} | {r for i in instances for r in i.open}

    @invariant()
    def nobody_is_forgotten(self):
        """Check that each waiting request is at an instance, in the queue, or done and held for its turn."""
        if self.model is None:
            return
        flying = self.flying()
        waiting = [c for c in self.model.clients.values() if c.waits]
        held = len(self.model.dispatcher.early_outcomes)
        elsewhere = [c for c in waiting if c.request not in flying]
        assert len(elsewhere) <= self.model.dispatcher.queued + held

    @invariant()
    def nobody_waits_without_need(self):
        """Check that queued requests wait for an instance or for a timer."""
        if self.model is None or not self.model.dispatcher.queued:
            return
        ready = [i for i in self.model.instances if i.state is InstanceState.READY]
        if not any(i.state is not InstanceState.FAILED for i in self.model.instances):
            raise AssertionError("requests wait although no instance is going to take them")
        if self.sequences and self.flying():
            # They may wait for the one before them, or for a place beside it.
            return
        if any(i.feed.in_flight < (i.feed.window if self.kind == "default" else 1) for i in ready):
            alarm = self.model.alarm
            assert alarm is not None
            assert alarm.due is not None
            assert alarm.due > self.model.now

    @invariant()
    def batches_are_what_the_model_takes(self):
        if self.model is None:
            return
        for instance in self.model.instances:
            for execution in instance.batches:
                sizes = [request.batch_size for request in execution.requests]
                assert sum(sizes) <= (3 if self.sequences else 4)
                assert self.kind != "default" or len(sizes) == 1

    @invariant()
    def queues_keep_their_limits(self):
        if self.model is None or self.policy is None or self.put_back:
            return
        flying = self.flying()
        queued = [c for c in self.model.clients.values() if c.waits and c.request not in flying]
        held = set(self.model.dispatcher.early_outcomes)
        by_level: dict[int, int] = {}
        for client in queued:
            if client.request in held:
                continue
            level = 0
            if self.policy.priority_levels:
                asked = client.request.options.priority
                level = asked if 1 <= asked <= 3 else 2
            by_level[level] = by_level.get(level, 0) + 1
        for level, count in by_level.items():
            policy = self.policy.priority_queue_policy.get(level, self.policy.default_queue_policy)
            assert not policy.max_queue_size or count <= policy.max_queue_size

    @invariant()
    def order_is_kept(self):
        if self.model is not None and self.kind == "ordered":
            done = [client for client in self.model.order_done if not client.cancelled]
            places = [self.model.order_out.index(client) for client in done]
            assert places == sorted(places)

    @invariant()
    def reasons_are_true(self):
        """A request is refused for what can happen to a model of this kind, and for nothing else."""
        if self.model is None:
            return
        for client in self.model.clients.values():
            for outcome in client.outcomes:
                if isinstance(outcome, BridgeError) and not client.executions:
                    self.check_refusal(client, outcome)

    def check_refusal(self, client, error):
        text = error.message
        if "timeout" in text:
            assert error.code == ErrorCode.UNAVAILABLE
            assert self.kind == "late" or self.sequences
        elif "maximum queue size" in text:
            assert self.kind in ("short", "levels")
        elif "stopped accepting" in text:
            assert self.stopped
        elif "limit of" in text:
            assert self.model.tickets < TICKETS
        elif "cannot be served" in text:
            assert any(i.last_error for i in self.model.instances)
        else:
            assert self.sequences
            assert not client.request.options.start or "was not executed" in text

    # -- the end ---

    def settle(self):
        """With instances that work on, everything comes out, and nothing is left behind."""
        model = self.model
        for _ in range(3 * len(model.clients) + 10):
            for instance in model.instances:
                if instance.state is not InstanceState.READY:
                    instance.come_up()
                while instance.batches or instance.open:
                    if instance.batches:
                        instance.land()
                    else:
                        instance.close_open(instance.open[0])
            model.advance(IDLE_US * US)
        assert [c.serial for c in model.clients.values() if c.waits] == []
        assert [c.serial for c in model.clients.values() if not c.slot_freed] == []
        assert model.dispatcher.pending == 0
        assert model.dispatcher.early_outcomes == {}
        # What holds a request that has ended would keep its memory until the next collection.
        ended = [client.request for client in model.clients.values()]
        assert [r for r in ended if (r.item, r.on_done, r.on_partial) != (None, None, None)] == []
        if not self.stopped:
            model.stop()
        assert model.idle


class BatchingMachine(ModelMachine):
    @initialize(
        kind=st.sampled_from(["default", *DYNAMIC]),
        instances=st.integers(1, 3),
        window=st.integers(1, 3),
        tickets=TICKET_COUNTS,
    )
    def begin(self, kind, instances, window, tickets):
        self.start(kind, instances, window, tickets)


class SequenceMachine(ModelMachine):
    @initialize(
        kind=st.sampled_from(list(SEQUENCES)),
        iterative=st.booleans(),
        instances=st.integers(1, 2),
        few=st.booleans(),
    )
    def begin(self, kind, iterative, instances, few):
        tickets = FEWER_THAN_CANDIDATES if few and "oldest" in kind else TICKETS
        self.start(kind + " iterative" * iterative, instances, 1, tickets)


BatchingMachine.TestCase.settings = SequenceMachine.TestCase.settings = settings(
    stateful_step_count=40
)
test_batching = BatchingMachine.TestCase
test_sequences = SequenceMachine.TestCase


def test_what_waits_behind_a_request_is_answered_once_that_is_cancelled():
    more = "max_batch_size: 1 dynamic_batching { preserve_ordering: true }"
    model = VirtualModel(model_config("IN FP32 [-1]", more=more))
    for instance in model.instances:
        instance.come_up()
    unstarted, behind, _ = (model.submit() for _ in range(3))
    dies, works = model.instances
    works.land()
    dies.die(hopeless=False)
    assert not behind.outcomes
    model.cancel(unstarted)
    assert behind.outcomes
    model.close()
