"""Messages of a stub, whole and broken: taken, or the end of that stub, and of no other."""

import asyncio
import gc
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import example, given

from gpubridge.dataplane import InstanceFeed
from gpubridge.engine.ipc.in_flight import send_turn
from gpubridge.engine.ipc.stub_connection import StubConnection
from gpubridge.engine.memory.regions import Regions
from gpubridge.engine.workers import Workers
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.channel import pair
from gpubridge.transport.context import CallContext, ResponseContext
from gpubridge.transport.messages import (
    Kind,
    control_message,
    encode_frame,
    encode_responses,
    encode_result_batch,
)
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors
from tests.fuzz.budget import fuzzed, mutations
from tests.fuzz.fake_stub import RequestAtStub

_encode = record_encoder()
_NONE = encode_tensors(())
WORKERS = Workers()
_NUMBERS = st.sampled_from(
    [0, 1, -1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1 << 70, 1.5, None, "1", []]
)
_TEXTS = st.sampled_from(["", "a line", "\ud800", None, 7, {}])


def _signature(shape, datatype="FP32"):
    return encode_tensors([("OUT", datatype, shape)])


_SIGNATURES = st.sampled_from(
    [
        (_NONE, ()),
        (_signature([4]), (1 << 32, 0, 16, 0)),
        (_signature([4]), (1, 0, 16, 0)),
        (_signature([4]), (1, (1 << 64) - 8, 16, 0)),
        (_signature([0]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([0, 1 << 62]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([0, -1]), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([1], "BYTES"), (0, 0, 0, 0xFFFF_FFFF)),
        (_signature([1], "BYTES"), (1 << 32, 1 << 40, 4, 5)),
    ]
)
_CONTEXTS = st.sampled_from(
    [
        b"",
        bytes(4),
        b"\xff" * 4,
        ResponseContext(error="wrong", code=2).encoded(),
        ResponseContext(code=99).encoded(),
        ResponseContext(error="cut", code=2).encoded()[:-1],
        ResponseContext(parameters='{"a":1,"b":true,"c":"x","d":1.5}').encoded(),
        ResponseContext(parameters="[1]").encoded(),
        ResponseContext(parameters='"x"').encoded(),
        ResponseContext(parameters='{"a":"\\ud800"}').encoded(),
        ResponseContext(parameters='{"a":[1],"b":null,"c":99999999999999999999}').encoded(),
        ResponseContext(passed_on=True).encoded(),
        ResponseContext(event=1, event_lease=1 << 63).encoded(),
        CallContext(model="m", handed_on=True).encoded(),
    ]
)


@st.composite
def _records(draw):
    signature, refs = draw(_SIGNATURES)
    flags = draw(st.sampled_from([0, 0, 1, 2, 4, 5, 8, 12]))
    return _encode(draw(st.integers(0, 5)), *signature, refs, flags, context=draw(_CONTEXTS))


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
            Kind.NOTICE, level=level, text=text, file=file, line=line
        ),
        _NUMBERS,
        _TEXTS,
        _TEXTS,
        _NUMBERS,
    ),
    st.builds(lambda error: control_message(Kind.FAILED, error=error), _TEXTS),
    st.builds(lambda config: control_message(Kind.COMPLETED, config=config), _TEXTS),
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
    feed = InstanceFeed(None)
    link = StubConnection(
        ours,
        regions,
        regions.arena("m"),
        ModelStatistics("m", 1),
        1 << 16,
        SimpleNamespace(
            feed=feed,
            on_completed=lambda text: None,
            on_ready=lambda fd: None,
            on_failed=lambda text: None,
            on_broken=broken.append,
            on_notice=lambda fields: None,
        ),
        WORKERS,
        send_turn(),
    )
    asked = [RequestAtStub(regions.arena("m")) for _ in range(3)]
    feed.connect(link.requests)
    feed.submit([asked[0].request, asked[1].request])
    feed.submit([asked[2].request])
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
        regions.arena("m").free(request.slot)
    assert regions.lent() == (0, 0)
    regions.close()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_message_of_a_stub_is_taken_or_ends_the_stub():
    @fuzzed()
    @given(st.lists(_MESSAGES, max_size=6))
    @example([control_message(Kind.DROP_REGION, region=1 << 64)])
    @example(
        [
            encode_responses(
                [_encode(0, *_NONE, (), 0, context=ResponseContext(parameters="[1]").encoded())], 0
            )
        ]
    )
    def hear(messages):
        asyncio.run(_hear(messages))

    # The requests refer to themselves, and so their memory waits for the collector.
    gc.collect()
    before = _descriptors()
    hear()
    gc.collect()
    assert _descriptors() == before
