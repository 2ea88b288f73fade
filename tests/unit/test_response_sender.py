"""Guarantees for threads that share a response sender."""

import threading

import pytest

from gpubridge.pb_utils import InferenceResponse
from gpubridge.pb_utils.exceptions import TritonModelException
from gpubridge.pb_utils.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponseSender,
)

pytestmark = pytest.mark.both_runtimes

FINAL = TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Stream:
    """Has no credit until it is told; writes down what it was sent, and how much came after the end."""

    decoupled = True

    def __init__(self):
        self.writable = threading.Event()
        self.asked = threading.Event()
        self.sent = []

    def waits(self, *_):
        self.asked.set()
        assert self.writable.wait(30)
        return ()

    def close(self):
        self.writable.set()

    def send(self, response, final):
        self.sent.append("final" if final else "response")

    def cancelled(self):
        return False

    def sender_dropped(self, sent):
        self.sent.append("dropped")


@pytest.fixture
def waiting():
    """A stream, its sender, and a thread that waits for credit; and what that thread was told."""
    stream = Stream()
    sender = InferenceResponseSender._on(stream)
    told = []

    def send():
        try:
            sender.send(InferenceResponse([]))
        except TritonModelException as error:
            told.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    assert stream.asked.wait(30)
    yield stream, sender, thread, told
    stream.writable.set()
    thread.join()


def test_the_end_goes_out_after_a_response_that_waits_for_room(waiting):
    stream, sender, thread, told = waiting
    end = threading.Thread(target=sender.send, kwargs={"flags": FINAL})
    end.start()
    end.join(0.05)
    assert stream.sent == []
    stream.writable.set()
    thread.join()
    end.join()
    assert stream.sent == ["response", "final"]
    assert told == []


def test_a_response_that_waits_when_its_sender_is_closed_is_not_sent(waiting):
    stream, sender, thread, told = waiting
    # As the failure of execute closes it, which does not wait for a slow client.
    assert sender._close()
    thread.join()
    assert stream.sent == []
    assert told == ["Unable to send response. Response sender has been closed."]
