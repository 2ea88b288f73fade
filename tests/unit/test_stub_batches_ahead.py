"""A look at the next batch: nothing is lost by it, and nothing comes before its turn."""

import os

import pytest

from gpubridge.stub.uploading import BatchesAhead
from gpubridge.transport.channel import Channel, ChannelClosed, close_all, pair
from gpubridge.transport.context import RequestContext
from gpubridge.transport.messages import Kind, control_message, decode_control, encode_frame
from gpubridge.transport.records import record_reader
from gpubridge.transport.wait_predictor import WaitPredictor
from tests.unit.server_messages import encode_batch


def execute(*sequences):
    return encode_frame(Kind.EXECUTE, [encode_batch(number, []) for number in sequences])


class Ends:
    def __init__(self):
        self.server, stub = (Channel(sock) for sock in pair())
        self.regions = []
        self.reader = record_reader(RequestContext)
        self.stub = stub
        self.ahead = BatchesAhead(stub, self.reader, self.take)

    def take(self, message, fds):
        self.regions.append(decode_control(message)["region"])
        close_all(fds)

    def run(self):
        """Take one EXECUTE message; returns each of its batches with the one that was seen after it."""
        message, _ = self.ahead.receive()
        seen = []
        for batch in self.ahead.batches(message, self.reader):
            following = self.ahead.begin()
            seen.append((batch.sequence, following and following.sequence))
        return seen

    def close(self):
        self.server.close()
        self.stub.close()


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


def send_region(ends, number):
    fd = os.memfd_create("test")
    ends.server.send(control_message(Kind.REGION, region=number, size=1), [fd])
    os.close(fd)


def test_the_next_batch_is_seen_in_its_message_or_in_the_next(ends):
    ends.server.send(execute(1, 2))
    ends.server.send(execute(3))
    ends.server.send(execute(4))
    assert ends.run() == [(1, 2), (2, 3)]
    assert ends.run() == [(3, 4)]
    assert ends.run() == [(4, None)]


def test_missing_batches_are_not_waited_for(ends):
    ends.server.send(execute(1))
    assert ends.run() == [(1, None)]
    ends.server.send(execute(2))
    assert ends.run() == [(2, None)]


def test_regions_are_taken_on_the_way_to_the_next_batch(ends):
    ends.server.send(execute(1))
    send_region(ends, 7)
    send_region(ends, 8)
    ends.server.send(control_message(Kind.DEVICE_REGION, region=9))
    ends.server.send(execute(2))
    assert ends.run() == [(1, 2)]
    assert ends.regions == [7, 8, 9]


@pytest.mark.parametrize("kind", [Kind.DROP_REGION, Kind.FINALIZE])
def test_nothing_else_is_done_before_its_turn(ends, kind):
    ends.server.send(execute(1, 2))
    ends.server.send(control_message(kind, region=7))
    send_region(ends, 8)
    ends.server.send(execute(3))
    assert ends.run() == [(1, 2), (2, None)]
    assert ends.ahead.receive() == (control_message(kind, region=7), [])
    assert ends.regions == []
    assert ends.ahead.receive()[0][0] == Kind.REGION
    assert ends.run() == [(3, None)]


def test_messages_that_return_memory_hide_no_batch_and_keep_their_turn(ends):
    trim = control_message(Kind.TRIM, idle_seconds=0)
    ends.server.send(execute(1))
    ends.server.send(trim)
    send_region(ends, 7)
    ends.server.send(trim)
    ends.server.send(execute(2))
    assert ends.run() == [(1, 2)]
    assert ends.regions == [7]
    assert [ends.ahead.receive(), ends.ahead.receive()] == [(trim, []), (trim, [])]
    assert ends.run() == [(2, None)]


def test_a_message_that_was_seen_is_there_without_a_wait(ends):
    ends.server.send(execute(1))
    ends.server.send(execute(2))
    assert ends.run() == [(1, 2)]
    assert ends.ahead.wait(0)
    ends.ahead.poll(10**12, WaitPredictor(0))
    assert ends.run() == [(2, None)]
    assert not ends.ahead.wait(0)


def test_the_end_of_the_server_is_told_at_once(ends):
    ends.server.send(execute(1))
    ends.server.close()
    with pytest.raises(ChannelClosed):
        ends.run()
