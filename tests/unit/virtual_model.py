"""A model in virtual time: the real dispatcher before instances that only pretend to work."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

from gpubridge.engine import dispatcher as dispatcher_module
from gpubridge.engine.dispatcher import Dispatcher
from gpubridge.engine.instance_state import InstanceState
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import Completed, InferRequest, RequestOptions
from gpubridge.telemetry.statistics import ModelStatistics

__all__ = ["Client", "Execution", "VirtualInstance", "VirtualModel"]


_OF_INSTANCES = ("it failed", "it died")


@dataclasses.dataclass(eq=False)
class Client:
    """What the sender of a request knows, and what must be true of it."""

    request: InferRequest
    serial: int
    previous: Client | None = None
    outcomes: list = dataclasses.field(default_factory=list)
    cancelled: bool = False
    slot_freed: bool = False
    executions: list = dataclasses.field(default_factory=list)

    @property
    def waits(self):
        return not self.cancelled and not self.outcomes


@dataclasses.dataclass(eq=False)
class Execution:
    """A batch at an instance."""

    requests: list
    started: bool = False


class VirtualAlarm:
    def __init__(self, on_due):
        self.on_due = on_due
        self.due = None

    def set(self, due_ns):
        if self.due is None or due_ns < self.due:
            self.due = due_ns

    def close(self):
        self.due = None


class VirtualInstance:
    """Has the surface of `Instance` that the dispatcher sees; ``window`` batches may wait here."""

    def __init__(self, model, index, window):
        self.model, self.index, self.room = model, index, window
        self.least_window = 1
        self.state = InstanceState.RESTARTING
        self.window = self.in_flight = 0
        self.open: list[InferRequest] = []
        self.last_error = ""
        self.batches: list[Execution] = []
        self.life = 0

    @property
    def open_requests(self):
        return len(self.open)

    @property
    def batches_at_stub(self):
        return len(self.batches)

    def submit(self, requests):
        assert self.state is InstanceState.READY
        assert self.in_flight < self.window or len(self.batches) < self.least_window
        assert requests
        self.in_flight += len(requests)
        self.batches.append(Execution(list(requests)))
        for request in requests:
            if request.batch_size:
                request.instance = self
                self.model.given_out(request, self)

    def cancel(self, request, *, running_only=False):
        pass

    def passed_on(self, request, responses):
        pass

    # -- what happens to it ---

    def come_up(self):
        self.state = InstanceState.READY
        self.window = self.room
        self.life += 1
        self.model.dispatcher.on_up(self)

    def start(self):
        """Start the batch that is first in line."""
        if self.batches and not self.batches[0].started:
            self.batches[0].started = True

    def land(self, failing=(), rescheduled=(), going_on=()):
        """End the first batch; requests at some places fail, want to run again, or are not over."""
        self.start()
        execution = self.batches.pop(0)
        returning = []
        for place, request in enumerate(execution.requests):
            if place in going_on and request.batch_size:
                self.open.append(request)
                continue
            self.note_end(request)
            if place in rescheduled and self.model.iterative:
                request.instance = None
                if request.batch_size:
                    returning.append(request)
                continue
            self.model.give_back(request)
            if place in failing:
                request.finish(BridgeError(_OF_INSTANCES[0], ErrorCode.INTERNAL))
            else:
                request.finish("response")
        self.in_flight -= len(execution.requests)
        now = self.model.now
        completed = Completed(returning=returning, batches=1, requests=len(execution.requests))
        self.model.dispatcher.on_batches(completed, now)

    def note_end(self, request):
        if request.batch_size:
            self.model.clients[request].executions[-1].append("landed")

    def close_open(self, request):
        """End a request that went on after its batch."""
        self.open.remove(request)
        self.note_end(request)
        self.model.give_back(request)
        request.finish("last response")
        self.model.dispatcher.on_responses([request], self.model.now)

    def die(self, hopeless):
        """Lose what was started; ``hopeless`` keeps it from being waited for."""
        lost = self.open + [r for e in self.batches if e.started for r in e.requests]
        self.open = []
        unstarted = [r for e in self.batches if not e.started for r in e.requests]
        for request in lost:
            self.model.give_back(request)
        self.batches.clear()
        self.in_flight = self.window = 0
        self.state = InstanceState.FAILING if hopeless else InstanceState.RESTARTING
        self.last_error = "it died"
        error = BridgeError(_OF_INSTANCES[1], ErrorCode.UNAVAILABLE)
        self.model.dispatcher.on_death(self, lost, unstarted, error)


class VirtualModel:
    """Clients, a dispatcher, instances, and a clock that only `advance` moves.

    Every promise about single requests is checked where it would be broken: no outcome twice or after
    a cancel, no slot given back twice, no sequence that goes on with a gap.
    """

    def __init__(self, config, instances=2, window=1):
        self.now = 1_000_000
        self.clients: dict[InferRequest, Client] = {}
        self.known: dict[int, Client] = {}
        self.order_out: list[Client] = []
        self.order_done: list[Client] = []
        self.iterative = config.message.sequence_batching.iterative_sequence
        self.on_outcome = None
        self.idle = 0
        arena = SimpleNamespace(free=self._free)
        with mock.patch.object(dispatcher_module, "Alarm", VirtualAlarm):
            self.dispatcher = Dispatcher(
                config, arena, ModelStatistics("m", 1), SimpleNamespace(used=False)
            )
        # Only a scheduler without choice feeds ahead of what any instance does now; others do for those
        # that want to have a batch before its turn.
        ahead = config.message.WhichOneof("scheduling_choice") is None
        self.instances = [
            VirtualInstance(self, i, window if ahead else 1) for i in range(instances)
        ]
        self.dispatcher.instances = self.instances
        if not ahead and window > 1:
            self.dispatcher.fed_ahead = self.instances
            for instance in self.instances:
                instance.least_window = window

    @property
    def alarm(self):
        return self.dispatcher._alarm

    def __enter__(self):
        def clock():
            return self.now

        self.clock = mock.patch.object(dispatcher_module, "_clock", clock)
        self.clock.start()
        return self

    def __exit__(self, *_):
        self.clock.stop()

    # -- clients ---

    def submit(self, size=1, number=0, start=False, end=False, shape=(1,), **options):
        """Send a request; returns what its client knows."""
        options = RequestOptions(
            correlation_id=number, start=start, end=end, shapes=(("IN", (size, *shape)),), **options
        )
        slot = object()
        request = InferRequest(
            b"", slot, 0, (), self._done, f"r{len(self.clients)}", batch_size=size, options=options
        )
        client = self.clients[request] = Client(request, len(self.clients))
        request.on_done = lambda outcome: self._done(client, outcome)
        if number:
            client.previous = None if start else self.known.get(number)
        # It may be executed, or refused, at once.
        before, self.known[number] = self.known.get(number), client
        self.dispatcher.submit(request)
        turned_away = client.outcomes and not client.executions
        if turned_away and before is not None and self.known[number] is client:
            self.known[number] = before
        return client

    def cancel(self, client):
        """Say that nobody waits any more."""
        client.cancelled = True
        client.request.cancel()

    def _done(self, client, outcome):
        assert not client.cancelled, "an outcome came after the cancel"
        assert not client.outcomes, "a request was answered twice"
        assert client.slot_freed, "a request was over before its memory was given back"
        client.outcomes.append(outcome)
        if not isinstance(outcome, BridgeError) or outcome.message in _OF_INSTANCES:
            # Not who was put back by an instance that died, and is refused then.
            self.order_done.append(client)
        if self.on_outcome is not None:
            self.on_outcome(client)

    # -- instances ---

    def given_out(self, request, instance):
        """Check what an instance gets; called for each request."""
        client = self.clients[request]
        assert not client.outcomes
        if client not in self.order_out:
            self.order_out.append(client)
        home = [instance.index, instance.life]
        if request.options.correlation_id and not request.options.start:
            before = client.executions or (client.previous and client.previous.executions)
            assert before, "a sequence went on without what came before"
            assert before[-1][:2] == home, "a sequence went on elsewhere"
            assert before[-1][2:] == ["landed"], "a sequence went on before its answer"
        client.executions.append(home)

    def give_back(self, request):
        slot, request.slot = request.slot, None
        if slot is not None:
            self._free_of(self.clients[request])

    def _free(self, slot):
        # The request that is refused has let go of its slot already: find it by what it had.
        free = [c for c in self.clients.values() if c.request.slot is None and not c.slot_freed]
        assert len(free) == 1, "a slot was given back twice"
        self._free_of(free[0])

    def _free_of(self, client):
        assert not client.slot_freed, "a slot was given back twice"
        client.slot_freed = True

    # -- time ---

    def advance(self, step_ns):
        """Let time pass; alarms ring when they are due."""
        end = self.now + step_ns
        while self.alarm is not None and self.alarm.due is not None and self.alarm.due <= end:
            self.now = max(self.now, self.alarm.due)
            self.alarm.due = None
            self.alarm.on_due()
        self.now = end

    def stop(self):
        """Tell the dispatcher to take nothing new; ``idle`` counts how often it says that it is."""

        def on_idle():
            assert self.dispatcher.pending == 0
            self.idle += 1

        self.dispatcher.stop(on_idle)
