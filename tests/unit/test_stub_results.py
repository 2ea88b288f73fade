"""Sending of results by a stub: quick ones together, none delayed by a long batch."""

import socket
import struct
import time

import pytest

from gpubridge.host_shm import Segment
from gpubridge.stub.limits import LIMITS
from gpubridge.stub.results import ResultSender
from gpubridge.transport.channel import Channel, pair
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import ControlPage
from gpubridge.transport.messages import encode_result_batch
from gpubridge.transport.records import record_encoder, record_reader
from gpubridge.transport.signatures import encode_signature
from tests.unit.server_messages import decode_results
from tests.waits import poll

EMPTY = encode_signature(())


@pytest.fixture
def ends():
    stub, server = pair()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 30, 0))
    sender, receiver = Channel(stub), Channel(server)
    control = ControlPage(Segment.create(0, ControlPage.SIZE))
    yield ResultSender(sender, control), receiver
    control.close()
    sender.close()
    receiver.close()


def result(sequence):
    return encode_result_batch(sequence, (1, 1, 2), 0, [record_encoder()(sequence, EMPTY, b"", ())])


def sequences(receiver):
    message, _ = receiver.receive()
    return [batch.sequence for batch in decode_results(message, record_reader(RequestContext))]


def test_quick_results_of_a_message_travel_together(ends):
    sender, receiver = ends
    for sequence in (1, 2):
        sender.add(result(sequence), 1_000, 2_000, last=False)
    sender.add(result(3), 2_000, 3_000, last=True)
    received = []
    while len(received) < 3:
        received += sequences(receiver)
    assert received == [1, 2, 3]


def take_long(sender, receiver):
    """Let the sender see a batch that takes long: from then on it watches."""
    sender.add(result(99), 1_000, 1_000_000_000, last=True)
    assert sequences(receiver) == [99]


def test_the_watch_goes_on_after_it_has_sent(ends):
    sender, receiver = ends
    take_long(sender, receiver)
    for sequence in range(1, 6):
        sender.add(result(sequence), 1_000, 2_000, last=False)
        assert sequences(receiver) == [sequence]


def test_the_watch_ends_after_many_quick_batches(ends, monkeypatch):
    monkeypatch.setattr("gpubridge.stub.results.LIMITS", LIMITS._replace(quiet_looks=0))
    sender, receiver = ends
    take_long(sender, receiver)
    for _ in range(1000):
        sender.add(result(1), 1_000, 2_000, last=False)
        sender.add(result(2), 1_000, 2_000, last=True)
        received = sequences(receiver)
        while 2 not in received:
            received += sequences(receiver)
    assert poll(lambda: not sender._gathering.is_set(), 100)
    sender.add(result(3), 1_000, 2_000, last=False)
    time.sleep(0.02)
    sender.add(result(4), 1_000, 2_000, last=True)
    assert sequences(receiver) == [3, 4]


def test_a_batch_that_took_long_is_not_held_back(ends):
    sender, receiver = ends
    sender.add(result(1), 1_000, 1_000_000_000, last=False)
    assert sequences(receiver) == [1]


def test_a_forked_child_forgets_its_parents_results(ends):
    sender, receiver = ends
    sender.disown()
    sender.add(result(7), 1_000, 2_000, last=True)
    assert sequences(receiver) == [7]
