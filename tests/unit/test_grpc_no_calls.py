"""Requests on the port of gRPC that are no calls: as a web page may send them to any server."""

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw
from tests.unit.http2_frames import encode_headers

REQUEST = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())
OK, INTERNAL = 0, 13


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "none"])
@pytest.mark.parametrize(
    ("verb", "type_", "status"),
    [
        ("GET", "application/grpc", 405),
        ("OPTIONS", "application/grpc", 405),
        ("post", "application/grpc", 405),
        ("POST", "text/plain", 415),
        ("POST", "", 415),
        ("POST", "application/json", 415),
        ("POST", "application/grpc-web", 415),
        ("POST", "text/application/grpc", 415),
    ],
)
async def test_is_refused(method, verb, type_, status):
    endpoint = GrpcEndpoint()
    endpoint.receive(PREFACE)
    # Again: known headers are not read anew.
    for number in (1, 3):
        opening = head(number, method, ("content-type", type_), verb=verb)
        endpoint.receive(opening, frame(0, 1, number, REQUEST))
        await endpoint.settle()
    assert endpoint.statuses(":status") == {1: [status], 3: [status]}
    assert endpoint.statuses() == {1: [INTERNAL], 3: [INTERNAL]}
    assert endpoint.submitted == 0
    endpoint.lose()
    endpoint.regions.close()


@pytest.mark.parametrize(
    "type_", ["application/grpc", "application/grpc+proto", "application/grpc;a=b"]
)
async def test_types_of_grpc_are_taken(type_):
    endpoint = GrpcEndpoint()
    opening = head(1, "ModelInfer", ("content-type", type_))
    endpoint.receive(PREFACE, opening, frame(0, 1, 1, REQUEST))
    await endpoint.settle()
    assert endpoint.statuses() == {1: [OK]}
    endpoint.lose()
    endpoint.regions.close()


@pytest.mark.parametrize("trailer", [(":path", "/"), ("x", "a\0b"), ("connection", "close")])
async def test_a_call_ends_whose_trailers_are_malformed(trailer):
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE)
    block = encode_headers([tuple(part.encode() for part in trailer)])
    for number in (1, 3):
        endpoint.receive(head(number, "ModelInfer"), frame(0, 0, number, REQUEST))
        endpoint.receive(frame(1, 5, number, block))
        await endpoint.settle()
        assert bytes(endpoint.sent).endswith(frame(3, 0, number, b"\0\0\0\1"))
    assert len(endpoint.cancelled) == endpoint.submitted == 2
    assert endpoint.statuses() == {}
    endpoint.lose()
    endpoint.regions.close()
