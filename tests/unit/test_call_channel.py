"""The calls of a stub in the server: what a stub may send there, and what it is told."""

import re
import socket
import struct
from types import SimpleNamespace

import pytest

from gpubridge.dataplane import CallChannel, CallCounts
from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.frontend.bls.charged_calls import ChargedCalls
from gpubridge.frontend.bls.server import BlsConnection, CallHooks
from gpubridge.frontend.kept_bytes import UNCHARGED
from gpubridge.host_shm import Account, Budget, Segment
from gpubridge.request import NO_OPTIONS, InferResponse, RequestContext
from gpubridge.transport.calls import BLOCKS, CallKind, decode_records, encode_calls
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.records import record_encoder, record_reader
from gpubridge.transport.signatures import Signature, encode_tensors
from tests.fuzz.fake_stub import FakeStub

OWNER = 1
REGION = OWNER << 32 | 1
SIZE = 4096
INPUT, DIMS = encode_tensors([("IN", "FP32", (2,))])
NOTHING, _ = encode_tensors([])
CONTEXT = CallContext(model="called").encoded()


class Server:
    """Takes the calls of a stub, which has one region, and keeps their requests."""

    def __init__(self):
        self.fake_stub = FakeStub()
        self.segment = Segment.create(REGION, SIZE, "called")
        self.fake_stub.memory.add_segment(self.segment)
        ours, self.stub = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours = ours
        self.requests: list = []
        self.refused: list[str] = []
        self.asked: list = []
        self.caught_up = 0
        self.reshape = None
        self.counts = CallCounts()
        self.caller = SimpleNamespace(waits_for={}, settings=SimpleNamespace(model="caller"))
        self.busy = SimpleNamespace(waits_for={})
        self.connection = SimpleNamespace(device=None, catch_up=self.catch_up, account=None)
        names = SimpleNamespace(known={REGION})
        self.budget = Budget(512 << 10)
        self.charged = ChargedCalls(self.budget, Account(int), "caller")
        hooks = CallHooks(
            announcer=names,
            caller=self.caller,
            connection=self.connection,
            form=self.form,
            check=self.asked.append,
            failed=self.fail,
            describe=self.describe,
            long_text=lambda outcome: None,
            send_long=None,
            signature=lambda signature: NOTHING,
            receive=lambda *message: self.refused.append("other"),
            refuse=lambda error: self.refused.append(str(error)),
            send=self.stub.send,
            call_soon=lambda function: None,
            charged=self.charged,
        )
        self.calls = CallChannel(
            self.fake_stub.in_flight, record_reader(CallContext), hooks, ours.fileno()
        )
        self.charged.channel = self.calls

    def catch_up(self):
        self.caught_up += 1

    def form(self, record):
        if record.context.model != "called":
            raise BridgeError("no such model", ErrorCode.NOT_FOUND)
        return SimpleNamespace(
            submit=lambda request, origin: self.requests.append(request),
            home="called",
            needed=("called",),
            instances=lambda name: [self.busy],
            context=RequestContext(),
            shared=RequestContext(shared=True),
            decoupled=False,
            reshape=self.reshape,
            origin="caused",
            counts=self.counts,
            fit=lambda record, sizes: (INPUT, DIMS, 1, NO_OPTIONS),
        )

    def fail(self, record, error, begun):
        return error

    def describe(self, response):
        return [], False, b""

    def take(self, message):
        """Take what a stub sends."""
        self.stub.send(message)
        assert self.calls.receive()

    def told(self):
        """Return what the stub is told: of each answer its call, flags and context."""
        message = self.stub.recv(1 << 16)
        assert message[0] == CallKind.CALL_RESPONSES
        records = decode_records(message, record_reader(ResponseContext))
        return [(record.ticket, record.word, record.context) for record in records]

    def close(self):
        self.calls.close()
        self.charged.close()
        assert self.budget.used == 0
        self.fake_stub.close()
        self.ours.close()
        self.stub.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def call(number=7, region=REGION, offset=64, nbytes=8, lease=3, context=CONTEXT):
    refs = (region, offset, nbytes, lease)
    return record_encoder()(number, INPUT, DIMS, refs, 0, b"me", context)


def calls(*records, batch=0):
    return encode_calls(records, [batch] * len(records))


def test_a_call_reaches_its_model_and_its_answer_the_stub(server):
    server.take(calls(call(), batch=1))
    (request,) = server.requests
    (place,) = request.ranges
    assert (place.segment, place.offset, place.nbytes) == (server.segment, 64, 8)
    assert server.counts.ended == 0
    assert (request.identifier, request.context.shared) == ("me", False)
    assert server.caller.waits_for == {"called": 1}
    request.finish(InferResponse(Signature((), ()), (), []))
    assert server.told() == [(7, 0, ResponseContext())]
    assert server.caller.waits_for == {}
    assert (server.counts.ended, server.counts.spent_ns > 0) == (1, True)
    # It is over: no second outcome is sent.
    request.finish(None)
    assert server.calls.calls() == []


@pytest.mark.parametrize("homes", [("called", "called"), ("called", "other"), ("other", "called")])
def test_inputs_of_a_call_that_others_may_read_are_shared_wherever_they_lie(server, homes):
    segments = [Segment.create(REGION + 1 + at, SIZE, home) for at, home in enumerate(homes)]
    for segment in segments:
        server.fake_stub.memory.add_segment(segment)
    places = [
        (segment.region, 64 * at, 8, 3 + at) for at, segment in enumerate((*segments, segments[0]))
    ]
    signature, dims = encode_tensors([(name, "FP32", (2,)) for name in "ABC"])
    refs = [field for place in places for field in place]
    server.take(calls(record_encoder()(7, signature, dims, refs, 0, b"", CONTEXT)))
    (request,) = server.requests
    seen = [(each.segment.region, each.offset, each.nbytes) for each in request.ranges]
    assert seen == [place[:3] for place in places]
    assert request.context.shared == ("other" in homes)


@pytest.mark.parametrize("blocks", [0, BLOCKS])
def test_a_call_knows_the_batch_that_it_is_made_for(server, blocks):
    server.take(calls(call(1), batch=1 << 40 | blocks))
    server.calls.take([], [])
    (made,) = server.calls.calls()
    assert (made.number, made.batch, made.blocks) == (1, 1 << 40, bool(blocks))


def test_answers_of_calls_that_are_under_way_together_wait_for_each_other(server):
    server.take(calls(call(1), call(2)))
    first, second = server.requests
    first.finish(BridgeError("wrong", ErrorCode.NOT_FOUND))
    second.finish(BridgeError("too", ErrorCode.INTERNAL))
    told = server.told()
    assert [(number, context.error) for number, _, context in told] == [(1, "wrong"), (2, "too")]


def test_a_call_that_cannot_be_made_is_answered(server):
    other = CallContext(model="other").encoded()
    server.take(calls(call(context=other)))
    ((number, _, context),) = server.told()
    assert (number, context.error, context.code) == (7, "no such model", ErrorCode.NOT_FOUND)
    assert not server.requests
    assert not server.refused


def test_calls_that_there_is_no_memory_for_are_refused_while_the_open_ones_go_on(server):
    number, leases = 0, server.fake_stub.control.outputs
    while len(server.requests) == number:
        leases[number] = 1
        server.take(calls(call(number, lease=number)))
        number += 1
        assert number < 1000
    server.calls.flush()
    ((refused, _, context),) = server.told()
    assert (refused, context.code) == (number - 1, ErrorCode.UNAVAILABLE)
    # The caller may use its memory again, unlike that of the open ones.
    assert (leases[refused], leases[0]) == (0, 1)
    keep = (
        f"the {number - 1} open calls of model 'caller' keep [0-9]+ bytes .* [0-9]+ of 524288 bytes"
    )
    assert re.match(keep, context.error)
    assert 0 <= server.calls.kept - server.budget.used < UNCHARGED
    for request in server.requests[:200]:
        request.finish(None)
    server.take(calls(call(number)))
    assert len(server.requests) == number
    for request in server.requests[200:]:
        request.finish(None)
    assert len(server.told()) == number
    assert server.budget.used == 0


async def test_a_connection_that_is_closed_gives_the_charge_of_its_calls_back(server):
    idle = SimpleNamespace(close=lambda: None)
    bls = SimpleNamespace(
        budget=server.budget,
        deadlocks=SimpleNamespace(check=server.asked.append),
        control_requests=lambda *_: idle,
    )
    regions = SimpleNamespace(leave=lambda user, known: None)
    stub = SimpleNamespace(
        **vars(server.connection), workers=None, regions=regions, open_devices=None, arena=None
    )
    stub.account, stub.requests = Account(int), server.fake_stub.in_flight
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        opened = BlsConnection(bls, ours, stub, server.caller)
        assert opened._charged.charge(2 * UNCHARGED)
        assert server.budget.used
        opened.close()
    assert not server.budget.used


def test_somebody_looks_for_circles_where_all_instances_wait_themselves(server):
    server.take(calls(call(1), batch=1))
    server.busy.waits_for["caller"] = 1
    server.take(calls(call(2)))
    assert not server.asked
    server.take(calls(call(3), batch=1))
    assert [each.number for each in server.asked] == [3]
    for request in server.requests:
        request.finish(None)
    assert server.caller.waits_for == {}


GOOD = calls(call())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (GOOD[:-1], "it ends in the middle of a record"),
        (GOOD + b"x", "1 bytes after its end"),
        (struct.pack("<BxxxI", CallKind.CALL, 1 << 31) + call(), "it ends in the middle"),
        (GOOD[:15], "it ends in the middle"),
        (calls(call(), call()), "call 7, which there is already"),
        (calls(call(offset=SIZE - 4)), "memory that does not exist"),
        (calls(call(region=REGION + 1)), "memory that does not exist"),
        (calls(call(lease=1 << 20)), "memory that does not exist"),
        (calls(call(region=5)), "8 bytes at 64 of region 0x5 are not lent under ticket 3"),
        (calls(call(region=5, lease=NO_LEASE)), "are not lent"),
        (b"\x63" + GOOD[1:], "other"),
        (GOOD[:4], "other"),
    ],
)
def test_a_message_that_is_no_call_is_refused(server, message, said):
    server.take(message)
    assert said in server.refused[0]
    assert len(server.refused) == 1


def test_memory_may_have_been_announced_a_moment_ago(server):
    late = Segment.create(REGION + 1, SIZE, "called")
    server.connection.catch_up = lambda: server.fake_stub.memory.add_segment(late)
    server.take(calls(call(region=REGION + 1)))
    assert not server.refused
    assert server.requests[0].ranges[0].segment is late


def test_no_call_is_answered_after_the_end(server):
    server.take(GOOD)
    (left,) = server.calls.close()
    assert left.number == 7
    server.requests[0].finish(None)
    server.stub.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.stub.recv(100)
    assert not server.calls.receive()
