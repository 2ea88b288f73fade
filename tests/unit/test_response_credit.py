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
        count for count in range(2 * LIMIT) if next(stream.waits(InferenceResponse([]), True), None)
    )


def respond(fake_stub, request, count):
    """The server gets so many responses."""
    fake_stub.control.received[request.ticket] += count
    for _ in range(count):
        request.respond("response")


def test_responses_of_an_earlier_run_count_until_they_are_passed_on(fake_stub):
    request = InferRequest(b"", None, 0, (), lambda outcome: None)
    request.on_partial = lambda outcome: None
    stream = run(fake_stub, request)
    assert credit(stream) == LIMIT
    respond(fake_stub, request, LIMIT)
    request.passed_on(10)
    assert credit(stream) == 10
    respond(fake_stub, request, 10)
    # Between two runs the request is in no batch, but its client reads on.
    fake_stub.complete((fake_stub.sent, [record(request.ticket, ResponseFlag.RESCHEDULED)]))
    request.passed_on(4)
    stream = run(fake_stub, request)
    assert credit(stream) == 4
    respond(fake_stub, request, 4)
    request.passed_on(LIMIT)
    assert credit(stream) == LIMIT


ONE = "pb_utils.InferenceResponse([pb_utils.Tensor('OUT', data)])"


@pytest.mark.parametrize("runtime", ["native", "python"])
@pytest.mark.parametrize("passed_on", [0, 3 * LIMIT])
def test_a_model_waits_for_the_server_and_not_for_clients(runtime, passed_on, tmp_path):
    for start in started_stubs(runtime, tmp_path):
        stub = start(
            "sender = request.get_response_sender()",
            f"for _ in range({3 * LIMIT}):",
            f"    sender.send({ONE})",
            "sender.send(flags=1)",
            "return None",
            decoupled=True,
        )
        stub.page.passed_on[3] = passed_on
        stub.send([stub.record(3, np.ones((1, 1), np.float32))])
        for received in range(0, 3 * LIMIT, LIMIT):
            stub.page.received[3] = received
            assert all(each.word == ResponseFlag.OPEN for each in stub.responses(LIMIT))
        stub.page.received[3] = 3 * LIMIT
        assert stub.responses(1)[0].word == ResponseFlag.EMPTY


SENDS = {
    "thread": [
        "def work(sender):",
        f"    for _ in range({LIMIT + 2}):",
        f"        sender.send({ONE}, wait=True)",
        "    END",
        "threading.Thread(target=work, args=[sender]).start()",
    ],
    "coroutine": [
        "import asyncio",
        "async def work(sender):",
        f"    for _ in range({LIMIT + 2}):",
        f"        await sender.async_send({ONE})",
        "    END",
        "threading.Thread(target=lambda: asyncio.run(work(sender))).start()",
    ],
}


@pytest.mark.parametrize("runtime", ["native", "python"])
@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("drops", ["", "del sender"])
def test_a_response_that_waits_for_its_client_holds_up_no_model_that_is_to_end(
    runtime, sends, drops, tmp_path
):
    for start in started_stubs(runtime, tmp_path):
        stub = start(
            "sender = request.get_response_sender()",
            *[line.replace("END", drops or "sender.send(flags=1)") for line in SENDS[sends]],
            "return None",
            decoupled=True,
        )
        stub.send([stub.record(3, np.ones((1, 1), np.float32))])
        assert all(each.word == ResponseFlag.OPEN for each in stub.responses(LIMIT))
        stub.page.received[3] = LIMIT
        stub.page.cancelled[3] = CANCELLED
        # Its caller reads on: the model goes on when that has read.
        stub.page.passed_on[3] = 1
        assert stub.responses(1)[0].word == ResponseFlag.OPEN
        stub.page.cancelled[3] = GIVEN_UP
        (last,) = stub.responses(1)
        assert last.word == ResponseFlag.ERROR
        assert "the model is being unloaded" in stub.error(last)
