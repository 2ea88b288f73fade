"""Access to a request that is over, when its place in the server belongs to another."""

from types import SimpleNamespace

import pytest

from gpubridge.pb_utils import TritonModelException
from gpubridge.pb_utils.datatypes import OutputForm
from gpubridge.pb_utils.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL,
)
from gpubridge.stub.response_stream import RequestHandle, ResponseWriter
from gpubridge.transport.context import RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature

pytestmark = pytest.mark.both_runtimes

TICKET = 3


class Encoder:
    placement = SimpleNamespace(
        allocate=lambda *arguments: arguments, allocate_on_device=lambda *arguments: arguments
    )

    def encode_empty(self, ticket, flags):
        return b"nothing"

    def encode(self, record, response, flags=0):
        return b"answer"


@pytest.fixture
def cancelled():
    return bytearray(8)


@pytest.fixture
def handle(cancelled):
    control = SimpleNamespace(cancelled=cancelled, passed_on=[0] * 8)
    identity = SimpleNamespace(decoupled=True, iterative=False)
    results = SimpleNamespace(respond=lambda *_: None)
    writer = ResponseWriter(control, None, results, Encoder(), identity)
    return RequestHandle(writer, Record(TICKET, Signature((), ()), (), RequestContext(), 0, "", []))


def test_it_is_cancelled_while_it_lives(handle, cancelled):
    assert not handle.cancelled()
    cancelled[TICKET] = 1
    assert handle.cancelled()
    assert handle.response_sender().is_cancelled()


@pytest.mark.parametrize("was", [False, True])
def test_after_its_final_response_it_stays_what_it_was(handle, cancelled, was):
    cancelled[TICKET] = was
    sender = handle.response_sender()
    sender.send(flags=FINAL)
    cancelled[TICKET] = not was
    assert handle.cancelled() is was
    assert sender.is_cancelled() is was


@pytest.mark.parametrize("was", [False, True])
def test_after_its_response_was_returned_it_stays_what_it_was(handle, cancelled, was):
    handle.was_cancelled = was
    cancelled[TICKET] = not was
    assert handle.cancelled() is was


def test_no_output_is_placed_for_a_request_that_is_over(handle):
    form = OutputForm("OUT", "FP32", (1,), None)
    assert handle.output("OUT", "FP32", (1,), None)
    assert handle.output_on_device(form) == (handle.record, form)
    handle.response_sender().send(flags=FINAL)
    with pytest.raises(TritonModelException, match="a request that is not answered yet"):
        handle.output("OUT", "FP32", (1,), None)
    with pytest.raises(TritonModelException, match="a request that is not answered yet"):
        handle.output_on_device(form)


@pytest.mark.parametrize(("ask", "during"), [("response_sender", "_made_sender"), ("close", "end")])
def test_a_finalizer_that_asks_meanwhile_gets_the_same_sender(handle, monkeypatch, ask, during):
    kind, asked = type(handle), []
    method = getattr(kind, during)

    def asking(handle):
        if not asked:
            asked.append(None)
            asked[:] = [handle.response_sender()]
        return method(handle)

    monkeypatch.setattr(kind, during, asking)
    ended = getattr(handle, ask)()
    assert handle.response_sender() is asked[0]
    assert ended is (True if ask == "close" else asked[0])
    assert asked[0]._closed is (ask == "close")
