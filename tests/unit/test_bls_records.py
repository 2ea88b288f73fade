"""Records of calls and of their responses: the compiled module writes and reads what Python does."""

import os
import resource
import struct

import numpy as np
import pytest

from gpubridge.errors import ErrorCode
from gpubridge.host_shm import Segment
from gpubridge.pb_utils import InferenceRequest, Tensor, TritonModelException
from gpubridge.pb_utils.request import TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
from gpubridge.stub.bls.records import BlsRecords
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor import native
from gpubridge.transport.calls import CallKind, encode_records
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import ResponseContext
from gpubridge.transport.leases import BorrowedMemory, read_only_id
from gpubridge.transport.messages import ResponseFlag
from gpubridge.transport.records import record_encoder
from gpubridge.transport.signatures import encode_dims, encode_signature

pytestmark = pytest.mark.skipif(native.native() is None, reason=str(native.absence()))

REGION = 7
VALUES = np.arange(16, dtype=np.float32)
SIGNATURE = encode_signature([("OUT", "FP32", 2)])


class Side:
    """Records of one runtime, and memory that its responses lie in."""

    def __init__(self, compiled, monkeypatch):
        self.leases = memoryview(bytearray(b"\1" * 16))
        self.borrowed = BorrowedMemory(self.leases)
        self.segments: list[Segment] = []
        self.segment = Segment.create(REGION, 4096)
        self.segment.view[: VALUES.nbytes] = VALUES.tobytes()
        for region in (REGION, read_only_id(REGION)):
            self.borrowed.add(region, self.segment.view)
        self.lent = memoryview(bytearray(64))
        self.outputs = OutputMemory(1, 1 << 20, self.lent, self.segments.append, print)
        with monkeypatch.context() as patched:
            if not compiled:
                patched.setattr("gpubridge.stub.bls.records.native", lambda: None)
            self.records = BlsRecords(self.borrowed, self.outputs)


@pytest.fixture
def sides(monkeypatch):
    return [Side(compiled, monkeypatch) for compiled in (True, False)]


def placed(name, shape=(4,), offset=0):
    return Tensor._received(name, "FP32", shape, memoryview(b"\0" * 16), (REGION, offset, 16, 3))


def call(inputs, names=("OUT",), **said):
    return InferenceRequest(
        inputs=inputs, requested_output_names=list(names), model_name="called", **said
    )


CALLS = {
    "handed on": lambda: call([placed("A"), placed("B", (2, 2), 64)]),
    "another shape": lambda: call([placed("A", (2, 2)), placed("B", (4,), 64)]),
    "own": lambda: call([Tensor("A", VALUES), Tensor("B", VALUES[:3])]),
    "both": lambda: call([Tensor("A", VALUES), placed("B")]),
    "strings": lambda: call([Tensor("A", np.array([b"one", b"three"], np.object_))]),
    "empty": lambda: call([Tensor("A", np.empty((0, 3), np.int8))]),
    "no inputs": lambda: call([]),
    "id": lambda: call([placed("A")], request_id="números"),
    "outputs": lambda: call([placed("A")], ["Y", "X"]),
    "version": lambda: call([placed("A")], model_version=3),
    "sequence": lambda: call(
        [placed("A")], correlation_id=9, flags=TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
    ),
    "named sequence": lambda: call([placed("A")], correlation_id="nine"),
    "timeout": lambda: call([placed("A")], timeout=5),
    "parameters": lambda: call([placed("A")], parameters={"a": 1}),
}


def test_remembered_calls_are_told_apart(sides):
    compiled, python = (side.records for side in sides)
    for make in (*CALLS.values(), *CALLS.values()):
        for decoupled in (False, True):
            made = make()
            assert compiled.encode(1, made, decoupled) == python.encode(1, made, decoupled)


def test_own_inputs_are_copied_without_python_to_slots_that_are_lent_again(sides, monkeypatch):
    side = sides[0]
    made = [("A", VALUES), ("B", -VALUES[:3])]

    def places():
        record = side.records.encode(1, call([Tensor(*each) for each in made]), False)
        return list(struct.iter_unpack("<QQQI", record[-56:]))

    monkeypatch.setattr(OutputMemory, "place", None)
    first = places()
    monkeypatch.setattr(OutputMemory, "reserve_lease", None)
    side.lent[first[0][3]] = 0
    assert places() == first
    assert [side.lent[lease] for *_, lease in first] == [1, 1]
    memory = side.segments[0].view
    sent = [bytes(memory[at : at + size]) for _, at, size, _ in first]
    assert sent == [values.tobytes() for _, values in made]
    assert side.outputs.take_copied() == 2 * sum(map(len, sent))


def test_an_array_that_was_resized_since_is_refused_as_python_does(sides):
    for side in sides:
        values = np.zeros(4, np.float32)
        request = call([Tensor("A", values)])
        values.resize(8, refcheck=False)
        with pytest.raises(TritonModelException, match="its array was resized since"):
            side.records.encode(1, request, False)


@pytest.mark.parametrize("field", ["_request_id", "_model_name"])
def test_both_refuse_texts_that_are_no_unicode_alike(sides, field):
    seen = []
    for side in sides:
        request = call([placed("A")])
        setattr(request, field, "\ud800")
        try:
            seen.append(side.records.encode(1, request, False))
        except ValueError as error:
            seen.append(str(error))
    assert seen[0] == seen[1]


def response(number, flags=0, region=REGION, shape=(2, 2), context=b"", offset=0):
    return record_encoder()(
        number,
        SIGNATURE,
        encode_dims([shape]),
        (region, offset, 16, number),
        flags,
        context=context,
    )


def seen_of(response):
    if response is None:
        return None
    if response.has_error():
        return response.error().message(), response.error().code()
    tensors = [(t.name(), t.shape(), t.as_numpy().tolist()) for t in response.output_tensors()]
    return tensors, response.parameters()


def test_both_runtimes_read_the_same(sides):
    error = ResponseContext(error="no", code=3).encoded()
    records = [
        response(1),
        response(2, shape=(4, 1), offset=16),
        response(3, region=read_only_id(REGION)),
        response(4, ResponseFlag.OPEN, context=ResponseContext(parameters='{"a":1}').encoded()),
        record_encoder()(5, encode_signature(()), b"", (), ResponseFlag.ERROR, context=error),
        record_encoder()(6, encode_signature(()), b"", (), ResponseFlag.EMPTY),
        response(7, region=99),
    ]
    message = encode_records(CallKind.CALL_RESPONSES, records)
    read = [
        [(number, flags, seen_of(each)) for number, flags, each in side.records.decode(message)]
        for side in sides
    ]
    assert read[0] == read[1]
    assert read[0][1] == (2, 0, ([("OUT", [4, 1], VALUES[4:8].reshape(4, 1).tolist())], "{}"))
    assert read[0][4] == (5, ResponseFlag.ERROR, ("no", 3))


def test_a_lease_lasts_as_long_as_a_view_of_the_response(sides):
    message = encode_records(CallKind.CALL_RESPONSES, [response(1)])
    for side in sides:
        ((_, _, taken),) = side.records.decode(message)
        array = taken.output_tensors()[0].as_numpy()
        del taken
        assert side.leases[1] == 1
        del array
        assert side.leases[1] == 0


def test_responses_in_memory_for_which_there_is_no_descriptor_are_errors_that_say_so(sides):
    message = encode_records(CallKind.CALL_RESPONSES, [response(1, region=8), response(2)])
    fields, limits = {"region": 8, "size": 4096}, resource.getrlimit(resource.RLIMIT_NOFILE)
    for side in sides:
        fds = [os.dup(side.segment.fd) for _ in range(2)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (fds[-1] + 1, limits[1]))
        try:
            side.records.map(CallKind.REGION, fields, fds)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (_, _, refused), (_, _, taken) = side.records.decode(message)
        text, code = seen_of(refused)
        assert "Too many open files" in text
        assert "ulimit -n" in text
        assert (code, side.leases[1]) == (ErrorCode.UNAVAILABLE, 0)
        assert seen_of(taken)[0][0][2] == VALUES[:4].reshape(2, 2).tolist()
        # The lease of a response ends with it, not with the next collection of garbage.
        del taken
        assert side.leases[2] == 0
        # What was dropped and is announced again is mapped.
        side.records.map(CallKind.DROP_REGION, fields, [])
        side.records.map(CallKind.REGION, fields, fds)
        assert not side.records.decode(message)[0][2].has_error()


@pytest.mark.parametrize("end", range(0, 90, 7))
def test_no_runtime_takes_a_message_that_is_cut(sides, end):
    message = encode_records(CallKind.CALL_RESPONSES, [response(1)])
    assert end < len(message)
    for side in sides:
        for cut in (message[:end], message + b"\0"):
            with pytest.raises(MalformedMessage):
                side.records.decode(cut)
