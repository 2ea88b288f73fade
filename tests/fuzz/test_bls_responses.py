"""Responses to a model's calls, whole and broken: both runtimes make the same of them, or refuse them."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gpubridge.host_shm import Segment
from gpubridge.stub.bls import records as bls_records
from gpubridge.stub.bls.records import BlsRecords
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor import native
from gpubridge.transport.calls import CallKind, encode_records
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.leases import BorrowedMemory, read_only_id
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_tensors
from tests.fuzz.budget import fuzzed, mutations

pytestmark = pytest.mark.skipif(native.native() is None, reason=str(native.absence()))

_REGION = 1 << 32
_encode = record_encoder()
_TENSORS = st.sampled_from(
    [
        (("OUT", "FP32", [4]), (0, 16)),
        (("OUT", "FP32", [2, 2]), (16, 16)),
        (("OUT", "FP32", [4]), (4090, 16)),
        (("OUT", "FP32", [4]), (0, 15)),
        (("OUT", "FP32", [0]), (0, 0)),
        (("OUT", "FP32", [-1]), (0, 4)),
        (("OUT", "FP32", [1 << 62]), (0, 4)),
        (("OUT", "BOOL", [1 << 63 - 1]), ((1 << 64) - 1, 1)),
        (("OUT", "BYTES", [1]), (0, 8)),
        (("OTHER", "INT8", []), (3, 1)),
    ]
)
_CONTEXTS = st.sampled_from(
    [
        b"",
        bytes(4),
        b"\xff" * 4,
        ResponseContext(parameters='{"a":1}').encoded(),
        ResponseContext(error="wrong", code=2).encoded(),
        ResponseContext(error="wrong", code=99).encoded(),
        ResponseContext(error="cut").encoded()[:-1],
        ResponseContext(event=1, event_lease=1 << 63).encoded(),
    ]
)


@st.composite
def _records(draw):
    tensors = draw(st.lists(_TENSORS, max_size=2))
    signature, dims = encode_tensors([spec for spec, _ in tensors])
    refs = []
    for _, (offset, nbytes) in tensors:
        region = draw(st.sampled_from([_REGION] * 3 + [read_only_id(_REGION), 7]))
        refs += [region, offset, nbytes, draw(st.sampled_from([0, 1, 2, 15, 16]))]
    flags = draw(st.sampled_from([0, 0, 0, 1, 4, 8]))
    return _encode(
        draw(st.integers(0, 9)), signature, dims, tuple(refs), flags, context=draw(_CONTEXTS)
    )


_MESSAGES = st.one_of(
    st.lists(_records(), max_size=3).map(
        lambda records: encode_records(CallKind.CALL_RESPONSES, records)
    ),
    mutations(
        st.lists(_records(), max_size=2).map(
            lambda records: encode_records(CallKind.CALL_RESPONSES, records)
        ),
        2,
    ),
)


class _Side:
    """Records of one runtime, and the memory that responses lie in."""

    def __init__(self, segment):
        self.leases = bytearray(16)
        self.borrowed = BorrowedMemory(memoryview(self.leases))
        for region in (_REGION, read_only_id(_REGION)):
            self.borrowed.add(region, segment.view)
        outputs = OutputMemory(1, 1 << 20, memoryview(bytearray(64)), print, print)
        self.records = BlsRecords(self.borrowed, outputs)

    def read(self, message):
        """Return what the model would see, and the leases that last for as long as it looks."""
        self.leases[:] = b"\1" * 16
        try:
            made = self.records.decode(message)
        except MalformedMessage:
            return "refused"
        seen = [(number, flags, _seen(response)) for number, flags, response in made]
        held = self.borrowed.book.held
        del made
        assert self.borrowed.book.held == 0
        return seen, held


def _seen(response):
    if response is None:
        return None
    if response.has_error():
        return response.error().message(), response.error().code()
    tensors = [
        (tensor.name(), tensor.shape(), tensor.triton_dtype(), bytes(tensor._payload()))
        for tensor in response.output_tensors()
    ]
    return tensors, response.parameters()


@pytest.fixture(scope="module")
def sides():
    segment = Segment.create(_REGION, 4096)
    segment.view[:128] = np.arange(32, dtype=np.float32).tobytes()
    compiled = _Side(segment)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bls_records, "native", lambda: None)
        yield compiled, _Side(segment)
    segment.close()


@fuzzed(2)
@given(_MESSAGES)
def test_both_runtimes_read_the_same_or_refuse(sides, message):
    compiled, python = (side.read(message) for side in sides)
    if python == "refused" != compiled:
        # Of a record without a response the compiled reader does not look at the context.
        assert any(flags & ResponseFlag.EMPTY for _, flags, _ in compiled[0])
    else:
        assert compiled == python
