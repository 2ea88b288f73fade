"""Long parameters of calls and requests cross the server as they are: they are neither decoded nor copied."""

from types import SimpleNamespace

import pytest

from gpubridge.engine.ipc.stub_connection import StubConnection
from gpubridge.protocol.fields import json_parameters
from gpubridge.request import InferRequest, RequestContext
from gpubridge.transport.calls import check_utf8, decode_calls, encode_calls
from gpubridge.transport.channel import MalformedMessage
from gpubridge.transport.context import CallContext
from gpubridge.transport.records import record_encoder, record_reader
from gpubridge.transport.signatures import encode_tensors
from tests.fuzz.fake_stub import FakeStub

LONG = '{"text":"' + "é😀" * 50_000 + '"}'


def sent(fake_stub, parameters):
    """Return the message with a batch of requests that have such parameters, in pieces."""
    requests = []
    for number, each in enumerate(parameters):
        context = RequestContext(parameters=each, trace=number, timeout=5)
        requests.append(InferRequest(b"", None, 0, (), lambda outcome: None, f"r{number}", context))
    fake_stub.feed.submit(requests)
    (message,) = fake_stub.messages
    if isinstance(message, bytes):
        return [message]
    pieces = []
    queue = SimpleNamespace(send=pieces.extend)
    StubConnection._send_long(SimpleNamespace(_send_queue=queue), message)
    return pieces


@pytest.mark.parametrize("at", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_long_parameters_are_sent_where_short_ones_are(fake_stub, at):
    views = {number: memoryview(LONG.encode()) for number in at}
    texts = ["{}", '{"a":1}', ""]
    given = [views.get(number, text) for number, text in enumerate(texts)]
    pieces = sent(fake_stub, given)
    assert [piece for piece in pieces if isinstance(piece, memoryview)] == list(views.values())
    other = FakeStub()
    (whole,) = sent(other, [LONG if number in at else text for number, text in enumerate(texts)])
    assert b"".join(pieces) == whole
    other.close()


def test_batches_keep_their_order_around_long_parameters(fake_stub):
    for parameters in ("{}", "{}", memoryview(LONG.encode()), "{}"):
        context = RequestContext(parameters=parameters)
        fake_stub.feed.submit([InferRequest(b"", None, 0, (), print, "", context)])
    fake_stub.in_flight.flush()
    # The first goes at once; the next waits for what else comes, but not behind the long one.
    assert [type(message) for message in fake_stub.messages] == [bytes, bytes, list, bytes]


def message_of_calls(*contexts):
    signature, dims = encode_tensors([("IN", "FP32", (2,))])
    encode = record_encoder()
    records = [
        encode(number, signature, dims, (1, 2, 8, 3), 0, b"me", context)
        for number, context in enumerate(contexts)
    ]
    return encode_calls(records, [5] * len(records))


def test_long_parameters_of_a_call_are_its_message_s_memory():
    said = CallContext(model="m", version=3, parameters=LONG, timeout=5, trace=7)
    message = message_of_calls(said.encoded())
    (got,), batches = decode_calls(message, record_reader(CallContext))
    (whole,), _ = record_reader(CallContext).read(message, 16, 1, True)
    assert list(batches) == [5]
    parameters = got.context.parameters
    assert parameters.obj is message
    assert bytes(parameters) == LONG.encode()
    assert got.context.changed(parameters=LONG) == said
    assert got[:3] == whole[:3]
    assert got[4:6] == whole[4:6]
    assert list(got.refs) == list(whole.refs)


def test_calls_without_long_parameters_are_read_as_ever():
    short = CallContext(model="m", parameters="{}").encoded()
    long = CallContext(model="m", correlation_text="x" * 100_000).encoded()
    several = CallContext(model="m", parameters=LONG).encoded()
    for contexts in ([short], [long], [several, short]):
        message = message_of_calls(*contexts)
        got, _ = decode_calls(message, record_reader(CallContext))
        count = len(contexts)
        whole, _ = record_reader(CallContext).read(message, 8 + 8 * count, count, True)
        assert [record.context for record in got] == [record.context for record in whole]


@pytest.mark.parametrize("broken", [b"\xff", b"\xc3"])
def test_long_parameters_that_are_no_utf_8_are_refused(broken):
    said = CallContext(model="m", parameters="y" * 2_000_000).encoded()
    message = message_of_calls(said.replace(b"y" * len(broken), broken, 1))
    assert decode_calls(message_of_calls(said), record_reader(CallContext))
    with pytest.raises(MalformedMessage, match="utf-8"):
        decode_calls(message, record_reader(CallContext))
    with pytest.raises(MalformedMessage):
        decode_calls(message_of_calls(said)[:-1], record_reader(CallContext))


def test_messages_that_no_stub_sends_are_refused():
    said = CallContext(model="m" * (17 << 20), parameters=LONG).encoded()
    with pytest.raises(MalformedMessage, match=r"of kind 1 of 178\d+ bytes \(limit 16777216\)"):
        decode_calls(message_of_calls(said), record_reader(CallContext))


def test_characters_may_lie_across_the_pieces_that_are_checked():
    check_utf8(memoryview(b"y" + "😀".encode() * 300_000))
    with pytest.raises(ValueError, match="unexpected end"):
        check_utf8(memoryview("😀".encode()[:-1]))


def test_only_long_parameters_of_clients_stay_encoded():
    assert json_parameters({"a": "é"}) == '{"a":"é"}'
    long = json_parameters({"a": "é" * 50_000})
    assert isinstance(long, memoryview)
    assert bytes(long) == ('{"a":"' + "é" * 50_000 + '"}').encode()
