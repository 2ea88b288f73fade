"""Messages to stubs: long ones are put into memory beside the event loop, and all keep their order."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpubridge.engine.ipc.send_queue import SendQueue
from gpubridge.engine.workers import HEAVY_BYTES, Workers
from gpubridge.transport.channel import Channel, pair
from tests.unit.test_long_messages import LEAST_TURNS

LONG = HEAVY_BYTES + 1


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


class Ends:
    """A queue, and the stub's end of its channel."""

    def __init__(self):
        ours, theirs = pair()
        ours.setblocking(False)
        self.workers = Workers()
        self.ours, self.stub = Channel(ours), Channel(theirs)
        self.closed = asyncio.Event()
        self.blocked = []
        self.queue = SendQueue(self.ours, self.workers, self._close, self.blocked.append)

    def _close(self):
        self.closed.set()
        self.queue.close()

    async def received(self, count):
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(None, self.stub.receive) for _ in range(count)]

    def close(self):
        self.queue.close()
        self.workers.close()
        self.ours.close()
        self.stub.close()


@pytest.fixture
@asynccontextmanager
async def ends():
    ends = Ends()
    try:
        yield ends
    finally:
        ends.close()


async def test_long_and_short_messages_keep_their_order(ends):
    messages = [b"\1", b"\2" * LONG, b"\3", b"\4" * LONG, b"\5" * 200_000, b"\6"]
    for message in messages:
        ends.queue.send(message)
    assert [message for message, _ in await ends.received(len(messages))] == messages
    assert ends.blocked == [True, False]
    ends.queue.send(b"\7")
    assert await ends.received(1) == [(b"\7", [])]


async def test_pieces_are_one_message_and_descriptors_come_with_it(ends):
    there, here = os.pipe()
    ends.queue.send((b"\1a", memoryview(b"b" * LONG), b"c"), (here,))
    os.close(here)
    ((message, fds),) = await ends.received(1)
    assert message == b"\1a" + b"b" * LONG + b"c"
    os.write(fds[0], b"x")
    assert os.read(there, 1) == b"x"
    os.close(there)
    os.close(fds[0])


async def test_the_loop_runs_while_a_long_message_is_put_into_memory(ends):
    ends.queue.send(b"\1" * 60_000_000)
    receiving = asyncio.create_task(ends.received(1))
    turns = 0
    while ends.queue._waiting:
        turns += 1
        await asyncio.sleep(0)
    ((message, _),) = await receiving
    assert message == b"\1" * 60_000_000
    assert turns > LEAST_TURNS


async def test_a_queue_that_is_closed_beside_a_long_message_leaves_nothing_open(ends):
    before = descriptors()
    ends.queue.send(b"\1" * LONG, (0,))
    ends.queue.close()
    ends.workers.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert descriptors() == before


async def test_its_owner_is_told_of_a_stub_that_is_gone(ends):
    ends.stub.close()
    ends.queue.send(b"\1" * LONG)
    await ends.closed.wait()
