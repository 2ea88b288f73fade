"""Responses of decoupled models on streams: plain ones go out without Python, in order with the others."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from gpubridge.errors import BridgeError
from gpubridge.frontend.grpc.stream import StreamCall
from gpubridge.request import InferResponse
from gpubridge.schema import message_class
from gpubridge.transport.signatures import Signature, TensorSpec
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

WINDOW, MIB = (1 << 16) - 1, 1 << 20
WINDOW_UPDATE, RST_STREAM = 8, 3


def outputs(*values, name="OUT", **given):
    signature = Signature((TensorSpec(name, "FP32", 1, 4),), ())
    return InferResponse(signature, ((len(values),),), [b"%b" * len(values) % values], **given)


@pytest.fixture
@asynccontextmanager
async def flow(monkeypatch):
    """An endpoint, its request on a stream for a decoupled model, and what came to Python of its responses."""
    python = []
    respond = StreamCall._respond
    monkeypatch.setattr(StreamCall, "_respond", lambda *of: (python.append(of[2]), respond(*of)))
    endpoint = GrpcEndpoint(deferred=True)
    asked = raw(("A", "FP32", [1], b"abcd"), id="id")
    asked.model_name = "d"
    endpoint.receive(
        PREFACE + head(1, "ModelStreamInfer") + frame(0, 0, 1, message(asked.SerializeToString()))
    )
    ((_, request),) = endpoint.waiting
    yield endpoint, request, python
    endpoint.lose()
    assert endpoint.connection.account.held == 0
    endpoint.regions.close()


async def received(endpoint):
    """The responses that the client has got."""
    await asyncio.sleep(0)
    data, messages = endpoint.data(1), []
    while data:
        end = 5 + int.from_bytes(data[1:5], "big")
        messages.append(message_class("ModelStreamInferResponse").FromString(data[5:end]))
        data = data[end:]
    return messages


async def test_each_response_says_what_python_would_say(flow):
    endpoint, request, python = flow
    given = [outputs(b"abcd"), outputs(b"efgh", b"ijkl"), outputs(b"mnop", name="OTHER")]
    for each in given:
        request.respond(each)
    request.respond(outputs(b"abcd", parameters={"n": 1}))
    error = BridgeError("no luck")
    request.respond(error)
    request.respond(given[0])
    assert [type(each) for each in python] == [InferResponse, BridgeError]
    assert request.unsent == 0
    request.on_partial = None
    *seen, failed, last = await received(endpoint)
    assert failed.error_message == "no luck"
    assert last == seen[0]
    for each, wanted in zip(seen, [*given, given[0]], strict=True):
        made = each.infer_response
        assert (made.id, made.outputs[0].name) == ("id", wanted.signature.tensors[0].name)
        assert list(made.raw_output_contents) == wanted.buffers
        assert list(made.outputs[0].shape) == list(wanted.shapes[0])
        assert made.parameters["triton_final_response"].bool_param is False
    assert seen[3].infer_response.parameters["n"].int64_param == 1


async def test_a_client_that_does_not_read_gives_no_credit_until_it_does(flow):
    endpoint, request, python = flow
    large = outputs(*[b"abcd"] * (MIB // 4))
    for _ in range(3):
        request.respond(large)
    assert request.unsent == 3
    update = (4 * MIB).to_bytes(4, "big")
    endpoint.receive(frame(WINDOW_UPDATE, 0, 0, update) + frame(WINDOW_UPDATE, 0, 1, update))
    assert len(await received(endpoint)) == 3
    assert request.unsent == 0
    assert python == []


async def test_nothing_is_sent_on_a_stream_that_is_gone(flow):
    endpoint, request, python = flow
    endpoint.receive(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))
    assert endpoint.cancelled == [request]
    request.respond(outputs(b"abcd"))
    assert await received(endpoint) == python == []
