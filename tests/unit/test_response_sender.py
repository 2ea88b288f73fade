"""Guarantees for threads that share a response sender."""

from __future__ import annotations

import threading

import pytest

from gpubridge.pb_utils import InferenceResponse
from gpubridge.pb_utils.constants import TRITONSERVER_RESPONSE_COMPLETE_FINAL
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.response_sender import InferenceResponseSender

FINAL = TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Line:
    """Has no room until it is told; writes down what it was sent, and how much came after the end."""

    decoupled = True

    def __init__(self):
        self.room = threading.Event()
        self.asked = threading.Event()
        self.sent = []

    def wait_for_room(self, response):
        self.asked.set()
        assert self.room.wait(30)

    def close(self):
        self.room.set()

    def send(self, response, final):
        self.sent.append("final" if final else "response")

    def cancelled(self):
        return False

    def let_go(self, sent):
        self.sent.append("let go")


@pytest.fixture
def waiting():
    """A line, its sender, and a thread that waits for room; and what that thread was told."""
    line = Line()
    sender = InferenceResponseSender._on(line)
    told = []

    def send():
        try:
            sender.send(InferenceResponse([]))
        except TritonModelException as error:
            told.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    assert line.asked.wait(30)
    yield line, sender, thread, told
    line.room.set()
    thread.join()


def test_the_end_goes_out_after_a_response_that_waits_for_room(waiting):
    line, sender, thread, told = waiting
    end = threading.Thread(target=sender.send, kwargs={"flags": FINAL})
    end.start()
    end.join(0.05)
    assert line.sent == []
    line.room.set()
    thread.join()
    end.join()
    assert line.sent == ["response", "final"]
    assert told == []


def test_a_response_that_waits_when_its_sender_is_closed_is_not_sent(waiting):
    line, sender, thread, told = waiting
    # As the failure of execute closes it, which does not wait for a slow client.
    assert sender._close()
    thread.join()
    assert line.sent == []
    assert told == ["Unable to send response. Response sender has been closed."]
