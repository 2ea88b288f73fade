"""Access to a request that is over, when its place in the server belongs to another."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from gpubridge.pb_utils import TritonModelException
from gpubridge.pb_utils.constants import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from gpubridge.pb_utils.output_form import OutputForm
from gpubridge.pb_utils.response_sender import InferenceResponseSender
from gpubridge.stub.response_lines import DecoupledOrigin, RequestOrigin, ResponseDesk
from gpubridge.transport.context import RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature

TICKET = 3


class Answers:
    placement = SimpleNamespace(
        allocate=lambda *arguments: arguments, allocate_on_device=lambda *arguments: arguments
    )

    def nothing(self, ticket, flags):
        return b"nothing"

    def answer(self, record, response, flags=0):
        return b"answer"


@pytest.fixture
def cancelled():
    return bytearray(8)


@pytest.fixture(params=[RequestOrigin, DecoupledOrigin])
def origin(request, cancelled):
    control = SimpleNamespace(cancelled=cancelled, passed_on=[0] * 8)
    identity = SimpleNamespace(decoupled=True, iterative=False)
    results = SimpleNamespace(respond=lambda *_: None)
    desk = ResponseDesk(control, None, results, Answers(), identity)
    return request.param(desk, Record(TICKET, Signature((), ()), (), RequestContext(), 0, "", []))


def test_it_is_cancelled_while_it_lives(origin, cancelled):
    assert not origin.cancelled()
    cancelled[TICKET] = 1
    assert origin.cancelled()
    assert origin.response_sender().is_cancelled()


@pytest.mark.parametrize("was", [False, True])
def test_after_its_final_response_it_stays_what_it_was(origin, cancelled, was):
    cancelled[TICKET] = was
    sender = origin.response_sender()
    sender.send(flags=FINAL)
    cancelled[TICKET] = not was
    assert origin.cancelled() is was
    assert sender.is_cancelled() is was


@pytest.mark.parametrize("was", [False, True])
def test_after_its_response_was_returned_it_stays_what_it_was(origin, cancelled, was):
    origin.over = was
    cancelled[TICKET] = not was
    assert origin.cancelled() is was


def test_no_output_is_placed_for_a_request_that_is_over(origin):
    form = OutputForm("OUT", "FP32", (1,), None)
    assert origin.output("OUT", "FP32", (1,), None)
    assert origin.output_on_device(form) == (origin.record, form)
    origin.response_sender().send(flags=FINAL)
    with pytest.raises(TritonModelException, match="a request that is not answered yet"):
        origin.output("OUT", "FP32", (1,), None)
    with pytest.raises(TritonModelException, match="a request that is not answered yet"):
        origin.output_on_device(form)


def test_threads_that_ask_at_once_get_one_sender(origin, monkeypatch):
    make = InferenceResponseSender._on.__func__

    def slowly(kind, line):
        time.sleep(0.05)
        return make(kind, line)

    monkeypatch.setattr(InferenceResponseSender, "_on", classmethod(slowly))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(origin.response_sender())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(sender) for sender in found}) == 1
    found[0].send(flags=FINAL)
