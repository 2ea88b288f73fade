"""Circles of calls: each is refused by one of its calls, and nothing else is refused."""

import asyncio
import copy
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.frontend.bls.deadlock_detection import WaitGraph
from gpubridge.frontend.bls.deadlock_watch import DeadlockWatch
from tests.fuzz.budget import fuzzed

SCHEDULING = SimpleNamespace(
    default_queue_policy=SimpleNamespace(default_timeout_microseconds=0), priority_queue_policy={}
)
CONFIG = SimpleNamespace(message=SimpleNamespace(dynamic_batching=SCHEDULING))


class Call(SimpleNamespace):
    """A call, which is equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Instance:
    """An instance of a model, and the requests and calls at it.

    - ``executing``: the request whose ``execute`` runs.
    - ``made``: the calls that this makes. ``waits``: those of them in which it is blocked.
    """

    def __init__(self, model):
        self.model = model
        self.settings = SimpleNamespace(model=model.name)
        self.run = SimpleNamespace(connection=SimpleNamespace(requests=self))
        self.executing, self.made, self.waits = None, [], []

    # As the requests at a stub.
    def has_started(self, request):
        return True

    def executes(self, request):
        return self.executing is request

    # As who makes its calls.
    def calls_of_execute(self):
        return [call for call in self.made if not call.answered]

    def ask_blocking(self, calls):
        self.asked = [call for call in calls if call in self.waits]

    def refuse_call(self, call, error):
        assert call not in self.world.answered_at_best(), error.message
        if call.request in self.world.queue:
            self.world.queue.remove(call.request)
        self.world.answer(call.request)


class World:
    """Models whose executes call others, and return as soon as nothing blocks them."""

    def __init__(self, counts):
        self.models = [
            SimpleNamespace(name=f"m{index}", config=CONFIG) for index in range(len(counts))
        ]
        self.instances = []
        for model, count in zip(self.models, counts, strict=True):
            model.instances = [Instance(model) for _ in range(count)]
            self.instances += model.instances
        self.queue = []
        self.watch = DeadlockWatch(lambda instance: [instance])
        for instance in self.instances:
            instance.world, instance.asked = self, []

    def request(self, model, call=None):
        made = SimpleNamespace(model=self.models[model % len(self.models)], call=call, arrived=1)
        made.instance = None
        self.queue.append(made)
        self.dispatch()
        return made

    def dispatch(self):
        for request in list(self.queue):
            idle = [each for each in request.model.instances if each.executing is None]
            if idle:
                self.queue.remove(request)
                request.instance, idle[0].executing = idle[0], request

    def call(self, instance, model, kind):
        call = Call(answered=False, blocks=kind == "exec")
        call.request = self.request(model, call)
        call.form = SimpleNamespace(model=call.request.model)
        if kind == "thread":
            return
        instance.made.append(call)
        if call.blocks:
            instance.waits.append(call)
        self.watch.check(instance, call)

    def wait(self, instance, count):
        instance.waits += instance.calls_of_execute()[:count]

    def end(self, instance):
        request, instance.executing, instance.made = instance.executing, None, []
        self.answer(request)
        self.dispatch()

    def answer(self, request):
        if request.call is not None:
            request.call.answered = True
            for instance in self.instances:
                instance.waits = [each for each in instance.waits if each is not request.call]

    def told(self):
        """Have the stubs say in which calls they are blocked."""
        for instance in self.instances:
            for call in instance.asked:
                call.blocks = call.blocks or call in instance.waits
            instance.asked = []
        self.watch.look()

    def running(self):
        return [each for each in self.instances if each.executing is not None and not each.waits]

    def answered_at_best(self):
        """Return the calls that are answered once each execute has returned that can."""
        world = copy.deepcopy(self, {id(self.watch): SimpleNamespace()})
        calls = [call for each in self.instances for call in each.made]
        copies = [call for each in world.instances for call in each.made]
        while running := world.running():
            world.end(running[0])
        return [call for call, other in zip(calls, copies, strict=True) if other.answered]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["client", "exec", "begin", "thread", "wait", "end", "told"]),
        st.integers(0, 5),
        st.integers(0, 2),
    ),
    max_size=25,
)


@fuzzed(2)
@given(st.lists(st.integers(1, 2), min_size=1, max_size=3), STEPS)
def test_a_circle_is_refused_and_nothing_else(counts, steps):
    async def live():
        world = World(counts)
        for step in steps:
            take(world, *step)
        while world.running() or world.watch._suspects:
            world.watch._on_timer()
            world.told()
            running = world.running()
            assert running or not world.watch._suspects
            if running:
                world.end(running[0])
        assert not any(instance.waits for instance in world.instances), (
            "a circle that is not refused"
        )

    asyncio.run(live())


def take(world, what, who, number):
    running = world.running()
    if what == "client":
        world.request(number)
    elif what == "told":
        world.told()
    elif running:
        instance = running[who % len(running)]
        if what == "wait":
            world.wait(instance, number)
        elif what == "end":
            world.end(instance)
        else:
            world.call(instance, number, what)


async def test_a_bug_in_a_look_costs_no_call(monkeypatch, caplog):
    world = World([1])
    look, planted = WaitGraph.deadlock, [ZeroDivisionError("planted")]

    def deadlock(graph, call):
        if planted:
            raise planted.pop()
        return look(graph, call)

    monkeypatch.setattr(WaitGraph, "deadlock", deadlock)
    world.request(0)
    (instance,) = world.instances
    world.call(instance, 0, "exec")
    assert instance.waits
    world.watch._on_timer()
    assert not instance.waits
    assert "a look for a circle of calls failed by a bug of gpubridge" in caplog.text
