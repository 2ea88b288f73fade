"""Calls of a stub's model, whole and broken: each is answered once, or the message is refused."""

import hypothesis.strategies as st
from hypothesis import given

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.request import InferResponse
from gpubridge.transport.calls import encode_calls
from gpubridge.transport.context import CallContext
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import Signature, encode_tensors
from tests.fuzz.budget import fuzzed, mutations
from tests.unit.test_call_channel import CONTEXT, REGION, SIZE, Server

_SIGNATURES = st.sampled_from(
    [encode_tensors([("IN", "FP32", shape)]) for shape in ((2,), (-1,), (1 << 62,), (0,), ())]
)
_CONTEXTS = st.sampled_from(
    [
        CONTEXT,
        CONTEXT,
        CallContext(model="other").encoded(),
        CallContext(model="called", decoupled=True, version=-1).encoded(),
        CONTEXT[:-1],
        b"\xff" * 4,
    ]
)


@st.composite
def _calls(draw):
    nbytes = draw(st.sampled_from([8, 8, 0, SIZE, 1 << 63]))
    offset = draw(st.sampled_from([0, 64, SIZE - 8, SIZE - 7, (1 << 64) - 8]))
    refs = (
        draw(st.sampled_from([REGION, REGION, REGION, REGION + 1, 0, 5])),
        offset,
        nbytes,
        draw(st.sampled_from([0, 1, 3, 1 << 20, 0xFFFF_FFFF])),
    )
    identifier = draw(st.sampled_from([b"", b"me", b"\xff"]))
    return record_encoder()(
        draw(st.integers(0, 3)), *draw(_SIGNATURES), refs, 0, identifier, draw(_CONTEXTS)
    )


_MESSAGES = st.lists(_calls(), max_size=3).map(
    lambda records: encode_calls(records, [0] * len(records))
)


@fuzzed(2)
@given(
    st.lists(st.one_of(_MESSAGES, mutations(_MESSAGES, 2)), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_each_call_is_answered_once_or_its_message_is_refused(messages, fail):
    server = Server()
    try:
        # Memory of a request that the stub executes, which calls may name, too.
        server.fake_stub.enter(1)
        for message in filter(len, messages):
            server.take(message)
        made = list(zip(server.requests, fail, strict=False))
        for request, fails in made:
            outcome = InferResponse(Signature((), ()), (), [])
            request.finish(BridgeError("no", ErrorCode.INTERNAL) if fails else outcome)
        assert server.calls.calls() == []
        assert server.caller.waits_for == {}
        server.calls.flush()
        server.stub.setblocking(False)
        told = []
        while True:
            try:
                told += server.told()
            except BlockingIOError:
                break
        assert len([1 for *_, context in told if context.error in ("", "no")]) == len(made)
        assert len(server.refused) <= len(messages)
    finally:
        server.close()
