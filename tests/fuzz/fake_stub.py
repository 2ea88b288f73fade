"""A stub that is no process: requests at it, their memory, and their outcomes as endpoints encode them."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from gpubridge.dataplane import InstanceFeed, ModelCounters, SendTurn
from gpubridge.engine.ipc.decode_response import decode_response, failure_reason
from gpubridge.engine.ipc.in_flight import InFlightHooks, requests_at_stub
from gpubridge.errors import BridgeError
from gpubridge.host_shm import HostArena, Segment
from gpubridge.protocol.generate import encode_generated
from gpubridge.protocol.grpc.infer_response import encode_response as encode_grpc, error_frame
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response as encode_http
from gpubridge.protocol.status import error_body
from gpubridge.request import InferRequest
from gpubridge.transport.channel import MalformedMessage
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
from tests.unit.model_configs import model_config

NOW = 1_000_000_000
"""Time of messages; batches begin at 1, are executed from 2 on, and end at 3 ns."""
_NOTHING = encode_tensors(())
CONFIG = model_config("IN FP32 [1]", "OUT FP32 [-1]")
FORMS = [
    parse_request(
        b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[1]}],'
        b'"parameters":{"binary_data_output":%b}}' % binary,
        CONFIG,
        0,
    )
    for binary in (b"true", b"false")
]


class RequestAtStub:
    """A request at a stub, and its outcomes."""

    def __init__(self, arena: HostArena) -> None:
        self.outcomes: list[object] = []
        self.partials: list[object] = []
        self.request = InferRequest(
            b"",
            arena.allocate(64),
            0,
            [(0, 64)],
            lambda outcome: self.deliver(self.outcomes, outcome),
        )
        self.request.on_partial = lambda outcome: self.deliver(self.partials, outcome)

    @staticmethod
    def deliver(outcomes: list[object], outcome: object) -> None:
        """Encode the outcome as each endpoint does, and keep it."""
        if isinstance(outcome, BridgeError):
            error_body(outcome)
            error_frame(outcome.message, "")
        elif outcome is not None:
            for encode in (
                lambda: encode_http(FORMS[0], "", outcome, CONFIG, 1),
                lambda: encode_http(FORMS[1], "", outcome, CONFIG, 1),
                lambda: encode_generated("", outcome, CONFIG, 1),
                lambda: encode_grpc(replace(FORMS[0], encoding=None), "", outcome, CONFIG, 1),
            ):
                with suppress(BridgeError):
                    encode()
        outcomes.append(outcome)


def record(ticket: int, flags: int = 0) -> bytes:
    context = ResponseContext(error="wrong" if flags & ResponseFlag.ERROR else "")
    return record_encoder()(ticket, *_NOTHING, (), flags, b"", context.encoded())


@dataclass
class ListenerCalls:
    """Record of the events that an instance's listener gets of a message."""

    times: int = 0
    returning: list[InferRequest] = field(default_factory=list)
    traced: list[tuple] = field(default_factory=list)

    def on_batches(self, returning, traced, now):
        assert now >= NOW
        self.times += 1
        self.returning, self.traced = returning, traced


class FakeStub:
    """The server's side of a stub; tests complete its batches."""

    def __init__(
        self,
        counters: ModelCounters | None = None,
        turn: SendTurn | None = None,
        store: Callable[[InferRequest], object] | None = None,
        tickets: int = TICKETS,
    ) -> None:
        self.arena = HostArena(0, 32 << 20)
        self.control = ControlPage(Segment.create(0, ControlPage.SIZE))
        for cells in ("lent", "cancelled", "passed_on", "received"):
            setattr(self.control, cells, getattr(self.control, cells)[:tickets])
        self.memory = BorrowedMemory(self.control.outputs)
        self.counters = counters or ModelCounters()
        self.feed = InstanceFeed(self)
        self.messages: deque[object] = deque(maxlen=4)
        self.cancelled: list[tuple[int, int]] = []
        hooks = InFlightHooks(
            free=self.arena.free,
            memory=self.memory,
            owner=1,
            counters=self.counters,
            announcer=SimpleNamespace(known=set(), name=lambda segment, read_only: segment.region),
            context=lambda request: b"",
            decode=self.decode,
            cancelled=lambda *told: self.cancelled.append(told),
            send=self.messages.append,
            send_long=self.messages.append,
            receive=lambda *_: False,
            failed=self.fail,
            closed=lambda: None,
            turn=turn or SendTurn(lambda end: end(), -1, 64),
            feed=self.feed,
        )
        self.calls = ListenerCalls()
        self.in_flight = requests_at_stub(self.control, hooks, -1)
        if store is not None:
            self.in_flight.store_with(store)
        self.feed.connect(self.in_flight)
        self.flights: dict[int, list[RequestAtStub]] = {}
        self.asked: list[RequestAtStub] = []
        self.sent = 0

    def decode(self, record, request):
        outcome = decode_response(record, self.memory, request, self.in_flight.find, ())
        return outcome, failure_reason(record) if isinstance(outcome, BridgeError) else None

    @staticmethod
    def fail(error):
        if isinstance(error, (str, ValueError)):
            raise MalformedMessage(str(error))
        raise error

    def on_batches(self, *arguments):
        self.calls.on_batches(*arguments)

    def take(self, message):
        """Take a message; returns the calls of the listener."""
        self.calls = ListenerCalls()
        self.in_flight.take(message, NOW)
        return self.calls

    def complete(self, *batches):
        """Take the results of batches, given as (sequence, records)."""
        results = [encode_result_batch(number, (1, 2, 3), 0, made) for number, made in batches]
        return self.take(encode_frame(Kind.RESULTS, results))

    def respond(self, *records):
        """Take responses that a model sends by itself; returns whether requests are over now."""
        return self.take(encode_responses(records, 0)).times > 0

    def enter(self, size: int) -> None:
        batch = [RequestAtStub(self.arena) for _ in range(size)]
        self.sent += 1
        self.feed.submit([asked.request for asked in batch])
        self.flights[self.sent] = batch
        self.asked += batch

    def die(self, started_last: int) -> tuple[list[InferRequest], list[InferRequest]]:
        started, unstarted = self.in_flight.close(started_last)
        for request in unstarted:
            self.arena.free(request.slot)
        return started, unstarted

    def close(self) -> None:
        self.control.close()
        self.arena.close()
