"""A model in virtual time: the real dispatcher and the real ends of stubs that only pretend to work."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

from gpubridge.dataplane import InstanceFeed, SendTurn
from gpubridge.engine.ipc.decode_response import decode_response, failure_reason
from gpubridge.engine.ipc.in_flight import InFlightHooks, requests_at_stub
from gpubridge.engine.models import dispatcher as dispatcher_module
from gpubridge.engine.models.dispatcher import Dispatcher
from gpubridge.engine.supervisor.instance import InstanceState
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.request import InferRequest, RequestOptions
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.control import TICKETS, ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import (
    Kind,
    ResponseFlag,
    encode_frame,
    encode_responses,
    encode_result_batch,
)
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors

__all__ = ["REGION", "Client", "Execution", "VirtualInstance", "VirtualModel"]


_OF_INSTANCES = ("it failed", "it died")
_FAILED = ResponseContext(error="it failed", code=int(ErrorCode.INTERNAL)).encoded()
REGION = SimpleNamespace(region=7)
_NOTHING = encode_tensors(())
_AHEAD_NS = 1_000_000
"""About how much work a stub is sent ahead."""
_CLAIMS = 1 << 63


def _record(ticket, flags, context=b""):
    return record_encoder()(ticket, *_NOTHING, (), flags, b"", context)


@dataclasses.dataclass(eq=False)
class Client:
    """Knowledge of a request's sender, and its invariants."""

    request: InferRequest
    serial: int
    previous: "Client | None" = None
    outcomes: list = dataclasses.field(default_factory=list)
    cancelled: bool = False
    slot_freed: bool = False
    executions: list = dataclasses.field(default_factory=list)
    begun: bool = False

    @property
    def waits(self):
        return not self.cancelled and not self.outcomes


@dataclasses.dataclass(eq=False)
class Execution:
    """A batch at an instance."""

    sequence: int
    requests: list
    tickets: list
    started: bool = False


class VirtualTimer:
    def __init__(self, on_due):
        self.on_due = on_due
        self.due = None

    def set(self, due_ns):
        if self.due is None or due_ns < self.due:
            self.due = due_ns

    def close(self):
        self.due = None


class VirtualInstance:
    """An instance whose stub's answers are made up; ``window`` batches may wait at it.

    ``claims``: whether its stub claims batches before it begins them.
    """

    claims = True

    def __init__(self, model, index, window, least_window):
        self.model, self.index, self.least_window = model, index, least_window
        # Executed for so long, a request leaves time for as many as the window has.
        self.execute_ns = _AHEAD_NS // window - 1
        self.state = InstanceState.RESTARTING
        self.feed = InstanceFeed(model.dispatcher)
        self.open: list[InferRequest] = []
        self.last_error = ""
        self.batches: list[Execution] = []
        self.tickets: dict[InferRequest, int] = {}
        self.started = self.sent = self.life = 0
        self.requests = None
        self.warned_full = False

    def describe_full(self):
        self.warned_full = True
        return f"limit of {self.model.tickets}"

    def cancel(self, request, *, running_only=False):
        if request.instance is not None and request.instance is self.requests:
            self.requests.cancel(request, running_only)

    # -- what its stub is sent ---

    def sent_to_stub(self, _message):
        assert self.state is InstanceState.READY
        batches: dict[int, list[InferRequest]] = {}
        for sequence, ticket, request in self.requests.left():
            if sequence > self.sent:
                batches.setdefault(sequence, []).append(request)
                self.tickets[request] = ticket
        for self.sent, requests in sorted(batches.items()):
            tickets = [self.tickets[request] for request in requests]
            self.batches.append(Execution(self.sent, requests, tickets))
            before = self.feed.in_flight - len(requests)
            assert before < self.feed.window or len(self.batches) <= self.least_window
            for request in requests:
                if request.batch_size:
                    self.model.given_out(request, self)

    def decode(self, record, request):
        outcome = decode_response(record, self.memory, request, None, ())
        return outcome, failure_reason(record)

    # -- what happens to it ---

    def come_up(self):
        self.state = InstanceState.READY
        self.life += 1
        self.control = ControlPage(Segment.create(0, ControlPage.SIZE))
        self.control.claimed[0] = _CLAIMS if self.claims else 0
        for cells in ("lent", "cancelled", "passed_on", "received"):
            setattr(self.control, cells, getattr(self.control, cells)[: self.model.tickets])
        self.memory = BorrowedMemory(self.control.outputs)
        self.started = self.sent = 0
        hooks = InFlightHooks(
            free=self.model.free,
            memory=self.memory,
            owner=1,
            counters=self.model.statistics,
            announcer=SimpleNamespace(
                known={REGION.region}, name=lambda segment, read_only: segment.region
            ),
            context=None,
            decode=self.decode,
            cancelled=lambda ticket, batch: None,
            send=self.sent_to_stub,
            send_long=None,
            receive=None,
            failed=self.fail,
            closed=None,
            turn=self.model.turn,
            feed=self.feed,
        )
        self.requests = requests_at_stub(self.control, hooks, -1)
        self.feed.connect(self.requests)
        self.feed.open(self.least_window)
        self.model.dispatcher.on_ready(self)

    @staticmethod
    def fail(error):
        raise AssertionError(error)

    def start(self):
        """Start the batch that is first in line; those before it that were withdrawn are skipped."""
        while self.batches and not self.batches[0].started:
            execution = self.batches[0]
            if self.claims and execution.sequence <= self.control.claimed[0] - _CLAIMS:
                self.batches.pop(0)
                nothing = [_record(t, ResponseFlag.CANCELLED) for t in execution.tickets]
                self.answer(execution.sequence, nothing)
                continue
            if self.claims:
                self.control.claimed[0] = _CLAIMS + execution.sequence
            execution.started = True
            self.started = self.control.progress[0] = execution.sequence
            for request in filter(lambda request: request.batch_size, execution.requests):
                client = self.model.clients[request]
                assert self.model.iterative or not client.begun, "a request was executed twice"
                client.begun = True

    def answer(self, sequence, records):
        """Send the results of a batch."""
        now = self.model.now
        ended = now + self.execute_ns * len(records)
        batch = encode_result_batch(sequence, (now, now, ended), 0, records)
        self.requests.take(encode_frame(Kind.RESULTS, [batch]), ended)

    def land(self, failing=(), rescheduled=(), going_on=()):
        """End the first batch; requests at some places fail, want to run again, or are not over."""
        self.start()
        if not self.batches:
            return
        execution = self.batches.pop(0)
        records = []
        for place, request in enumerate(execution.requests):
            ticket = self.tickets[request]
            if place in going_on and request.batch_size:
                self.open.append(request)
                records.append(_record(ticket, ResponseFlag.OPEN | ResponseFlag.EMPTY))
                continue
            self.note_end(request)
            if place in rescheduled and self.model.iterative:
                records.append(_record(ticket, ResponseFlag.RESCHEDULED))
            elif place in failing:
                records.append(_record(ticket, ResponseFlag.ERROR, _FAILED))
            else:
                records.append(_record(ticket, 0))
        self.answer(execution.sequence, records)

    def note_end(self, request):
        if request.places:
            self.control.lent[self.tickets[request]] = 0
        if request.batch_size:
            self.model.clients[request].executions[-1].append("landed")

    def close_open(self, request):
        """End a request that went on after its batch."""
        self.open.remove(request)
        self.note_end(request)
        ended = encode_responses([_record(self.tickets[request], 0)], 0)
        self.requests.take(ended, self.model.now)

    def die(self, hopeless):
        """Lose what was started; ``hopeless`` keeps it from being waited for."""
        self.open = []
        self.batches.clear()
        self.state = InstanceState.FAILED if hopeless else InstanceState.RESTARTING
        self.last_error = "it died"
        error = BridgeError(_OF_INSTANCES[1], ErrorCode.UNAVAILABLE)
        self.model.dispatcher.on_death(self, *self.end(), error)

    def end(self):
        """Let go of the stub; returns the requests that it had started, and had not."""
        self.feed.close()
        left = self.requests.close(self.started)
        self.control.close()
        return left


class VirtualModel:
    """Clients, a dispatcher, instances, and a clock that only `advance` moves.

    Every promise about single requests is checked where it would be broken: no outcome twice or after
    a cancel, no slot given back twice, no sequence that goes on with a gap.
    """

    def __init__(self, config, instances=2, window=1, processors=64, tickets=TICKETS):
        self.tickets = tickets
        self.now = 1_000_000
        self.turn = SendTurn(lambda end: end(), -1, processors)
        self.clients: dict[InferRequest, Client] = {}
        self.known: dict[int, Client] = {}
        self.order_out: list[Client] = []
        self.order_done: list[Client] = []
        self.iterative = config.message.sequence_batching.iterative_sequence
        self.on_outcome = None
        self.idle = 0
        self.statistics = ModelStatistics("m", 1)
        arena = SimpleNamespace(free=self.free)
        with mock.patch.object(dispatcher_module, "KernelTimer", VirtualTimer):
            self.dispatcher = Dispatcher(
                config, arena, self.statistics, SimpleNamespace(used=False), lambda: self.now
            )
            self.dispatcher.serve([SimpleNamespace(feed=InstanceFeed(None))] * instances)
        # Only a scheduler without choice feeds ahead of what any instance does now; others do for those
        # that want to have a batch before its turn.
        ahead = config.message.WhichOneof("scheduling_choice") is None
        self.instances = [
            VirtualInstance(self, i, window if ahead else 1, 1 if ahead else window)
            for i in range(instances)
        ]
        self.dispatcher.serve(self.instances)

    @property
    def alarm(self):
        return self.dispatcher._timer

    def close(self):
        """Let go of all stubs."""
        for instance in self.instances:
            if instance.state is InstanceState.READY:
                instance.end()

    # -- clients ---

    def submit(
        self, size=1, number=0, start=False, end=False, shape=(1,), places=((0, 64),), **options
    ):
        """Send a request; returns what its client knows."""
        options = RequestOptions(
            correlation_id=number, start=start, end=end, shapes=(("IN", (size, *shape)),), **options
        )
        slot = SimpleNamespace(segment=REGION, offset=0, size=64)
        request = InferRequest(
            b"",
            slot,
            0,
            list(places),
            self._done,
            f"r{len(self.clients)}",
            batch_size=size,
            options=options,
        )
        client = self.clients[request] = Client(request, len(self.clients))
        slot.client = client
        request.on_done = lambda outcome: self._done(client, outcome)
        if number:
            client.previous = None if start else self.known.get(number)
        # It may be executed, or refused, at once.
        before, self.known[number] = self.known.get(number), client
        self.dispatcher.enqueue(request)
        turned_away = client.outcomes and not client.executions
        if turned_away and before is not None and self.known[number] is client:
            self.known[number] = before
        return client

    def cancel(self, client):
        """Note that no client waits any more."""
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

    def free(self, slot):
        """Take a slot back."""
        assert not slot.client.slot_freed, "a slot was given back twice"
        slot.client.slot_freed = True

    # -- time ---

    def advance(self, step_ns):
        """Let time pass; timers expire when they are due."""
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
