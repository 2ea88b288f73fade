"""Limit of responses in flight, counted over all runs of a rescheduled request."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpubridge.pb_utils import InferenceResponse
from gpubridge.request import InferRequest
from gpubridge.stub.response_stream import StubResponseStream
from gpubridge.transport.control import CANCELLED, GIVEN_UP
from gpubridge.transport.messages import ResponseFlag
from tests.fuzz.fake_stub import record
from tests.unit.looped_stub import started_stubs

LIMIT = 64


def run(fake_stub, request):
    """Begin a run; returns the request's response stream."""
    fake_stub.sent += 1
    fake_stub.feed.submit([request])
    stub = SimpleNamespace(control=fake_stub.control, identity=SimpleNamespace(decoupled=True))
    return StubResponseStream(stub, SimpleNamespace(ticket=request.ticket))


def credit(stream):
    """Use up the credit of a stream; returns how many responses that was."""
    return next(
        count for count in range(2 * LIMIT) if next(stream.waits(InferenceResponse([])), None)
    )


def test_responses_of_an_earlier_run_count_until_they_are_passed_on(fake_stub):
    request = InferRequest(b"", None, 0, (), lambda outcome: None)
    request.on_partial = lambda outcome: None
    stream = run(fake_stub, request)
    assert credit(stream) == LIMIT
    for _ in range(LIMIT):
        request.respond("response")
    request.passed_on(10)
    assert credit(stream) == 10
    for _ in range(10):
        request.respond("response")
    # Between two runs the request is in no batch, but its client reads on.
    fake_stub.complete((fake_stub.sent, [record(request.ticket, ResponseFlag.RESCHEDULED)]))
    request.passed_on(4)
    stream = run(fake_stub, request)
    assert credit(stream) == 4
    for _ in range(4):
        request.respond("response")
    request.passed_on(LIMIT)
    assert credit(stream) == LIMIT


@pytest.mark.parametrize("runtime", ["native", "python"])
@pytest.mark.parametrize("drops", ["", "del sender"])
def test_a_response_that_waits_for_its_client_holds_up_no_model_that_is_to_end(
    runtime, drops, tmp_path
):
    for start in started_stubs(runtime, tmp_path):
        stub = start(
            "sender = request.get_response_sender()",
            "def work(sender):",
            f"    for _ in range({LIMIT + 2}):",
            "        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)]))",
            f"    {drops or 'sender.send(flags=1)'}",
            "threading.Thread(target=work, args=[sender]).start()",
            "return None",
            decoupled=True,
        )
        stub.send([stub.record(3, np.ones((1, 1), np.float32))])
        assert all(each.word == ResponseFlag.OPEN for each in stub.responses(LIMIT))
        stub.page.cancelled[3] = CANCELLED
        # Its caller reads on: the model goes on when that has read.
        stub.page.passed_on[3] = 1
        assert stub.responses(1)[0].word == ResponseFlag.OPEN
        stub.page.cancelled[3] = GIVEN_UP
        (last,) = stub.responses(1)
        assert last.word == ResponseFlag.ERROR
        assert "the model is being unloaded" in stub.error(last)
