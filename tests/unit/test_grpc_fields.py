"""The top level of a ModelInferRequest, against protobuf's own reading of the same bytes."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, strategies as st

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Account, Body, Budget
from gpubridge.protocol.fields import LONGEST_ID
from gpubridge.protocol.generate import parse_generate
from gpubridge.protocol.grpc.infer_request import read_request
from gpubridge.protocol.grpc.messages import parse_message
from gpubridge.protocol.grpc.receiver import RequestReceiver
from gpubridge.protocol.infer_request import parse_request
from gpubridge.schema import message_class
from tests.unit.model_configs import model_config

Request = message_class("ModelInferRequest")


@pytest.mark.parametrize("nbytes", [LONGEST_ID, LONGEST_ID + 1])
def test_an_id_is_not_too_long(nbytes):
    message = Request(model_name="m", id="x" * nbytes).SerializeToString()
    config = model_config("A FP32 [-1] optional: true")
    header = b'{"inputs":[],"id":"%b"}' % (b"\xc3\xa9" * (nbytes // 2) + b"x" * (nbytes % 2))
    told = []
    for read in (
        lambda: read_request(message),
        lambda: parse_request(header, config, 0),
        lambda: parse_generate(header.replace(b'"inputs":[],', b""), config),
    ):
        if nbytes <= LONGEST_ID:
            assert len(read().identifier.encode()) == nbytes
        else:
            with pytest.raises(BridgeError) as error:
                read()
            told.append((error.value.code, error.value.message))
    expected = "expected a request id of at most 1048576 bytes, got one of 1048577"
    assert set(told) <= {(ErrorCode.INVALID_ARG, expected)}


NAMES = st.text(max_size=6)
RAWS = st.lists(st.binary(max_size=300), max_size=4)


@st.composite
def requests(draw):
    request = Request(
        model_name=draw(NAMES),
        model_version=draw(NAMES),
        id=draw(st.text(max_size=200)),
        raw_input_contents=draw(RAWS),
    )
    for name in draw(st.lists(NAMES, max_size=3)):
        entry = request.inputs.add(
            name=name, datatype="INT32", shape=draw(st.lists(st.integers(0, 9), max_size=3))
        )
        if draw(st.booleans()):
            entry.contents.int_contents.extend(draw(st.lists(st.integers(-9, 9), max_size=200)))
    for name in draw(st.lists(NAMES, max_size=2)):
        request.outputs.add(name=name)
    for name in draw(st.lists(NAMES, max_size=2)):
        request.parameters[name].int64_param = draw(st.integers(-5, 5))
    return request


# Unknown fields of every wire type, and a known one of another type than it should have.
UNKNOWN = [
    b"\xa0\x06\x96\x01",
    b"\xa1\x06" + bytes(8),
    b"\xa2\x06\x03abc",
    b"\xa5\x06" + bytes(4),
    b"\xa3\x06\x3a\x01x\x1a\x01y\xa4\x06",
    b"\x38\x07",
]


def read(data):
    """Read a message our way; None where it is refused in Triton's words."""
    try:
        head = read_request(data)
        return head, parse_message("ModelInferRequest", head.form)
    except BridgeError as error:
        if (error.message, error.code) != ("Unable to parse request", ErrorCode.INTERNAL):
            raise
        return None


def agree(data):
    """Check that our reading of a message is protobuf's, or that both refuse it."""
    found = read(data)
    try:
        expected = Request.FromString(data)
    except DecodeError:
        assert found is None
        return
    assert found is not None
    head, form = found
    raws = [data[at : at + size] for at, size in zip(head.offsets, head.sizes, strict=True)]
    assert raws == list(expected.raw_input_contents)
    assert head.identifier == expected.id
    assert not form.id
    assert not form.raw_input_contents
    form.id = expected.id
    form.raw_input_contents.extend(raws)
    assert form == expected


@given(requests(), st.lists(st.sampled_from(UNKNOWN), max_size=3), st.randoms())
def test_fields_in_any_order_and_unknown_ones(request_, unknown, random):
    pieces = [*unknown]
    for field, value in request_.ListFields():
        # Not by field.is_repeated: protobuf 5 has no such attribute.
        if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
            for i in range(len(value)) if field.name != "parameters" else ():
                part = Request()
                getattr(part, field.name).append(value[i])
                pieces.append(part.SerializeToString())
        else:
            pieces.append(Request(**{field.name: value}).SerializeToString())
    random.shuffle(pieces)
    agree(b"".join(pieces))


@given(requests(), st.data())
def test_mutated_bytes(request_, data):
    message = bytearray(request_.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if message:
            at = data.draw(st.integers(0, len(message) - 1))
            message[at] = data.draw(st.integers(0, 255))
    agree(bytes(message))


@given(st.binary(max_size=40))
@example(b"\xff" * 40)
@example(b"\x3a" + b"\xff" * 39)
@example(b"\x32" + b"\xff" * 9 + b"\x01")
@example(b"\x1a\x02\xff\xff")
@example(b"\xa3\x06")
@example(b"\xa4\x06")
@example(b"\x02\x00")
@example(b"\x0e")
@example(b"\x1a\x01x\x1a\x01y")
@example(b"\xba\x00\x01x")
def test_any_bytes(data):
    agree(data)


def test_every_truncation():
    request = Request(model_name="m", id="id", raw_input_contents=[b"x" * 200, b"yy"])
    request.inputs.add(name="IN", datatype="FP32", shape=[1])
    message = request.SerializeToString()
    for end in range(len(message)):
        agree(message[:end])


def test_a_length_that_never_ends_takes_no_time():
    with pytest.raises(BridgeError, match="Unable to parse request"):
        read_request(b"\x3a" + b"\xff" * 1_000_000)


def receiver(nbytes):
    return RequestReceiver(
        nbytes, lambda _: None, Body(Budget(1 << 24), Account(lambda: 0), lambda _: None)
    )


def test_a_raw_content_beyond_the_message_is_refused_before_it_comes():
    with pytest.raises(BridgeError, match="Unable to parse request"):
        receiver(10).feed(memoryview(b"\x3a\x0a"))


def test_more_bytes_than_announced_are_refused():
    with pytest.raises(BridgeError, match="Unable to parse request"):
        receiver(1).feed(memoryview(b"\x3a\x00"))


def test_too_many_fields_are_refused():
    data = b"\xa0\x06\x01" * 20_000
    with pytest.raises(BridgeError, match="at most 16384 fields") as refused:
        read_request(data)
    assert refused.value.code == ErrorCode.INVALID_ARG
