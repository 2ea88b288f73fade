"""gRPC clients that send no more: they get what they have asked for, and are not waited for."""

import pytest

from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw

REQUEST = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())


async def hang_up(sent, *, deferred=False):
    """Send and hang up in one turn of the event loop; returns the endpoint once all is answered."""
    endpoint = GrpcEndpoint(deferred=deferred)
    endpoint.receive(PREFACE + sent)
    endpoint.end()
    await endpoint.settle()
    endpoint.connection.connection_lost(None)
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    return endpoint


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_the_answer_comes_although_its_client_has_hung_up(method, deferred):
    endpoint = await hang_up(head(1, method) + frame(0, 1, 1, REQUEST), deferred=deferred)
    assert endpoint.statuses() == {1: [0]}
    assert endpoint.closed


async def test_an_answer_of_this_very_moment_is_sent_before_the_connection_ends():
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE + head(1, "ModelInfer") + frame(0, 1, 1, REQUEST))
    for model, request in endpoint.waiting:
        model.answer(request)
    endpoint.end()
    assert endpoint.closed
    assert endpoint.statuses() == {1: [0]}


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("size", [3, 20, 70_000])
async def test_half_a_request_is_refused(method, size):
    # The beginning of a message that is one long name of a model.
    begun = b"\x0a\xfc\xf0\x04" + b"m" * size
    endpoint = await hang_up(head(1, method) + frame(0, 0, 1, message(begun, length=80_000)))
    assert endpoint.statuses() == {1: [13]}
    assert endpoint.closed


async def test_an_answer_that_the_windows_hold_back_is_given_up():
    # SETTINGS_INITIAL_WINDOW_SIZE 0: no answer may be sent, and nothing can change that any more.
    no_window = frame(4, 0, 0, b"\0\4\0\0\0\0")
    endpoint = await hang_up(no_window + head(1, "ModelInfer") + frame(0, 1, 1, REQUEST))
    assert endpoint.statuses() == {}
    assert endpoint.closed
