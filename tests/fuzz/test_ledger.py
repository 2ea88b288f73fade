"""What becomes of the requests at a stub: one outcome each, whatever the stub says, and all memory back."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from contextlib import suppress
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import example, given

from gpubridge.engine.ledger import STILL_OPEN, Ledger
from gpubridge.engine.link import LinkEvents, StubLink
from gpubridge.engine.regions import Regions
from gpubridge.errors import BridgeError
from gpubridge.host_shm import HostArena, Segment
from gpubridge.protocol.generate import encode_generated
from gpubridge.protocol.grpc.infer_response import encode_response as encode_grpc
from gpubridge.protocol.grpc.stream import error_frame
from gpubridge.protocol.infer_request import parse_request
from gpubridge.protocol.infer_response import encode_response as encode_http
from gpubridge.protocol.status import error_body
from gpubridge.request import InferRequest
from gpubridge.transport.channel import MalformedMessage, pair
from gpubridge.transport.control import ControlPage
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.messages import (
    Batch,
    Kind,
    ResponseFlag,
    control_message,
    encode_frame,
    encode_responses,
    encode_result_batch,
)
from gpubridge.transport.records import Record, record_encoder
from gpubridge.transport.signatures import Signature, encode_signature
from tests.fuzz.budget import fuzzed, mutations
from tests.unit.model_configs import model_config

NOTHING = Signature((), ())


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


class Asked:
    """A request at a stub, and what its client was told."""

    def __init__(self, arena: HostArena) -> None:
        self.outcomes: list[object] = []
        self.partials: list[object] = []
        self.request = InferRequest(
            b"", arena.allocate(64), 0, [(0, 64)], lambda outcome: self.tell(self.outcomes, outcome)
        )
        self.request.on_partial = lambda outcome: self.tell(self.partials, outcome)

    @staticmethod
    def tell(told: list[object], outcome: object) -> None:
        """Do what doors do: encode the outcome, each in its way."""
        if isinstance(outcome, BridgeError):
            error_body(outcome)
            error_frame(outcome.message, "")
        elif outcome is not None:
            for encode in (
                lambda: encode_http(FORMS[0], outcome, CONFIG, 1),
                lambda: encode_http(FORMS[1], outcome, CONFIG, 1),
                lambda: encode_generated(FORMS[0], outcome, CONFIG, 1),
                lambda: encode_grpc(replace(FORMS[0], answer_for=None), "", outcome, CONFIG, 1),
            ):
                with suppress(BridgeError):
                    encode()
        told.append(outcome)


def record(ticket: int, flags: int = 0) -> Record:
    extras = {"error": "wrong"} if flags & ResponseFlag.ERROR else None
    return Record(ticket, NOTHING, extras, flags, "", ())


class Desk:
    """A ledger with its memory, and batches of requests in it."""

    def __init__(self) -> None:
        self.arena = HostArena(0, 1 << 20)
        self.control = ControlPage(Segment.create(0, ControlPage.SIZE))
        self.ledger = Ledger(self.control, self.arena, BorrowedMemory(self.control.outputs))
        self.flights: dict[int, list[Asked]] = {}
        self.asked: list[Asked] = []
        self.landed: list[InferRequest] = []
        self.closed: list[InferRequest] = []

    def enter(self, size: int) -> None:
        batch = [Asked(self.arena) for _ in range(size)]
        sequence = len(self.asked) + 1
        self.ledger.enter(sequence, [asked.request for asked in batch], None)
        self.flights[sequence] = batch
        self.asked += batch

    def die(self, started_last: int) -> tuple[list[InferRequest], list[InferRequest]]:
        started, unstarted = self.ledger.close(started_last)
        for request in unstarted:
            self.arena.free(request.slot)
        return started, unstarted

    def close(self) -> None:
        self.control.close()
        self.arena.close()


@fuzzed()
@given(st.data())
def test_every_request_has_one_end_however_batches_and_responses_interleave(data):
    desk = Desk()
    ledger = desk.ledger
    # What the stub still owes: by request, whether its batch is over and whether it is.
    tickets: dict[Asked, int] = {}
    over: set[Asked] = set()
    sent: dict[Asked, int] = {}
    going_on: set[Asked] = set()
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            live = [asked for asked in tickets if asked not in over]
            steps = ["enter"] + ["land"] * bool(desk.flights) + ["respond", "finish"] * bool(live)
            step = data.draw(st.sampled_from(steps))
            if step == "enter":
                before = len(desk.asked)
                desk.enter(data.draw(st.integers(1, 3)))
                tickets |= {asked: asked.request.ticket for asked in desk.asked[before:]}
                assert len(set(tickets.values())) == len(tickets)
            elif step == "land":
                sequence = data.draw(st.sampled_from(sorted(desk.flights)))
                batch = desk.flights.pop(sequence)
                records = []
                for asked in data.draw(st.permutations(batch)):
                    flags = ResponseFlag.OPEN | ResponseFlag.EMPTY
                    if asked not in over and data.draw(st.booleans()):
                        flags = data.draw(st.sampled_from([0, ResponseFlag.ERROR]))
                        over.add(asked)
                    elif asked not in over:
                        going_on.add(asked)
                    records.append(record(tickets[asked], flags))
                    desk.control.lent[tickets[asked]] = data.draw(st.integers(0, 1))
                _, requests, failures = ledger.land(Batch(sequence, records))
                assert requests == [asked.request for asked in batch]
                open_now = {r for r, reason in failures.items() if reason == STILL_OPEN}
                assert open_now == {asked.request for asked in batch if asked in going_on}
                for asked in batch:
                    if asked in over:
                        del tickets[asked]
            else:
                asked = data.draw(st.sampled_from(live))
                flags = ResponseFlag.OPEN if step == "respond" else 0
                flags |= data.draw(st.sampled_from([0, ResponseFlag.ERROR, ResponseFlag.EMPTY]))
                closed = ledger.respond(record(tickets[asked], flags))
                if step == "respond":
                    assert closed is None
                    sent[asked] = sent.get(asked, 0) + (not flags & ResponseFlag.EMPTY)
                    continue
                over.add(asked)
                assert (closed is not None) == (asked in going_on)
                if asked in going_on:
                    going_on.discard(asked)
                    desk.control.lent[tickets.pop(asked)] = data.draw(st.integers(0, 1))
            if data.draw(st.booleans()):
                ledger.settle_kept()
        started_last = data.draw(st.integers(0, len(desk.asked) + 1))
        started, unstarted = desk.die(started_last)
        assert len(set(started + unstarted)) == len(started + unstarted)
        for asked in desk.asked:
            ends = len(asked.outcomes) + (asked.request in started) + (asked.request in unstarted)
            assert ends == 1
            assert len(asked.outcomes) == (asked in over)
            assert len(asked.partials) == sent.get(asked, 0)
        assert desk.arena.lent() == (0, 0)
        assert ledger.open_requests == 0
    finally:
        desk.close()


@fuzzed()
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(1, 8),
            st.lists(
                st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 2, 4, 5, 8, 12, 15])),
                max_size=4,
            ),
        ),
        max_size=6,
    ),
    st.integers(0, 9),
)
# One that goes on, another that there is not: the first is still in its batch.
@example([2], [(False, 1, [(0, 12), (7, 0)])], 0)
def test_a_stub_that_lies_of_its_batches_costs_no_request_its_end(sizes, messages, started_last):
    desk = Desk()
    try:
        for size in sizes:
            desk.enter(size)
        try:
            for alone, sequence, records in messages:
                made = [record(ticket, flags) for ticket, flags in records]
                if alone:
                    for one in made:
                        desk.ledger.respond(one)
                else:
                    desk.ledger.land(Batch(sequence, made))
        except MalformedMessage:
            pass
        started, unstarted = desk.die(started_last)
        for asked in desk.asked:
            request = asked.request
            assert len(asked.outcomes) + started.count(request) + unstarted.count(request) == 1
        assert desk.arena.lent() == (0, 0)
    finally:
        desk.close()


# -- messages of a stub, whole and broken -------------------------------------------------------------

_encode = record_encoder()
_NONE = encode_signature(())
_NUMBERS = st.sampled_from([0, 1, -1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1 << 70, 1.5, None, "1", []])
_TEXTS = st.sampled_from(["", "a line", "\ud800", None, 7, {}])


def _signature(shape, datatype="FP32"):
    return encode_signature([("OUT", datatype, shape)])


_SIGNATURES = st.sampled_from(
    [
        (_NONE, ()),
        (_signature([4]), (1 << 32, 0, 16, 0)),
        (_signature([0]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([0, 1 << 62]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([0, 1 << 70]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([1], "BYTES"), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([1], "BYTES"), (1 << 32, 1 << 40, 4, 5)),
    ]
)
_EXTRAS = st.sampled_from(
    [
        b"",
        b"{}",
        b'{"error":"wrong","code":2}',
        b'{"error":[],"code":[]}',
        b'{"error":"\\ud800","code":99}',
        b'{"parameters":{"a":1,"b":true,"c":"x","d":1.5}}',
        b'{"parameters":[1]}',
        b'{"parameters":"x"}',
        b'{"parameters":{"a":[1],"b":null,"c":99999999999999999999}}',
        b"[]",
    ]
)


@st.composite
def _records(draw):
    signature, refs = draw(_SIGNATURES)
    flags = draw(st.sampled_from([0, 0, 1, 2, 4, 5, 8, 12]))
    return _encode(draw(st.integers(0, 5)), signature, refs, flags, extras=draw(_EXTRAS))


@st.composite
def _results(draw):
    times = draw(st.sampled_from([(1, 2, 3), (0, 0, 0), (3, 2, 1), (1, 1, (1 << 64) - 1)]))
    batches = [
        encode_result_batch(
            draw(st.integers(0, 3)), times, 0, draw(st.lists(_records(), max_size=3))
        )
        for _ in range(draw(st.integers(0, 2)))
    ]
    return encode_frame(Kind.RESULTS, batches)


_CONTROL = st.one_of(
    st.builds(
        lambda region, size: control_message(Kind.REGION, region=region, size=size),
        st.one_of(_NUMBERS, st.just(1 << 32)),
        st.one_of(_NUMBERS, st.just(4096)),
    ),
    st.builds(lambda region: control_message(Kind.DROP_REGION, region=region), _NUMBERS),
    st.builds(
        lambda level, text, file, line: control_message(
            Kind.LOG, level=level, text=text, file=file, line=line
        ),
        _NUMBERS,
        _TEXTS,
        _TEXTS,
        _NUMBERS,
    ),
    st.builds(lambda error: control_message(Kind.FAILED, error=error), _TEXTS),
    st.sampled_from([Kind.READY, Kind.FINALIZED, Kind.TRIM, 0, 99]).map(control_message),
)
_MESSAGES = st.one_of(
    _CONTROL,
    mutations(_CONTROL, 3),
    _results(),
    mutations(_results(), 3),
    st.builds(encode_responses, st.lists(_records(), max_size=3), st.just(0)),
    st.binary(min_size=1, max_size=60),
).filter(len)


async def _hear(messages: list[bytes]) -> None:
    """Let a link with two batches at its stub hear messages; everything has to be in order then."""
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what))
    broken: list[str] = []
    regions = Regions(1 << 20)
    ours, theirs = pair()
    link = StubLink(
        ours,
        regions,
        1 << 16,
        LinkEvents(
            lambda: None,
            lambda text: None,
            broken.append,
            lambda landed, now: None,
            lambda closed, now, copied: None,
            lambda fields: None,
        ),
    )
    asked = [Asked(regions.arena) for _ in range(3)]
    link.submit([asked[0].request, asked[1].request])
    link.submit([asked[2].request])
    await asyncio.sleep(0)
    region = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    try:
        for message in messages:
            if message[0] == Kind.REGION:
                socket.send_fds(theirs, [message], [region])
            else:
                theirs.send(message)
        link.catch_up()
        started, unstarted = link.close()
    finally:
        os.close(region)
        theirs.close()
    assert not failures
    for one in asked:
        ends = started.count(one.request) + unstarted.count(one.request)
        assert len(one.outcomes) + ends == 1
    for request in unstarted:
        regions.arena.free(request.slot)
    assert regions.arena.lent() == (0, 0)
    regions.close()


def test_whatever_a_stub_sends_is_taken_or_ends_the_stub():
    @fuzzed()
    @given(st.lists(_MESSAGES, max_size=6))
    def hear(messages):
        asyncio.run(_hear(messages))

    # The requests refer to themselves, and so their memory waits for the collector.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    hear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
