"""The server's thread that calls the driver: order, failures, and finalizers in the midst of anything."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from gpubridge.engine.devices.manager import AsyncDriverThread

# Regions in cycles die wherever a collection happens to run: in the midst of what hands others to the
# thread, on whatever thread that is.
FINALIZERS = """
import asyncio, gc, threading
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.device_region import ClientDeviceSegment, DeviceRegion

ROUNDS = 300
closed = []

class Segment:
    # Device memory, as far as its owners look at it.
    region, size, uuid, handle, pointer, fds = 1, 4096, "GPU-0", b"", 0, ()

    def close(self):
        closed.append(self)

async def main():
    memory = DeviceManager(1 << 20)
    await memory.run(int)

    def drop():
        for _ in range(ROUNDS):
            for owner in (
                DeviceRegion(Segment(), memory.free, Segment()),
                ClientDeviceSegment(Segment(), 1, b"", memory.free),
            ):
                owner.cycle = owner
            memory.free(Segment())

    gc.set_threshold(1, 1, 1)
    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await memory.run(int)
    gc.set_threshold(700)
    gc.collect()
    await memory.run(int)
    print(len(closed) == 3 * 4 * ROUNDS)
    await memory.close()

asyncio.run(main())
"""


@pytest.fixture
def thread():
    thread = AsyncDriverThread()
    yield thread
    thread.close()


def test_finalizers_hand_over_memory_wherever_they_run():
    done = subprocess.run(
        [sys.executable, "-c", FINALIZERS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_work_is_handed_over_amid_a_hand_over(thread):
    """A collection may run a finalizer at any point of it, in the same thread."""
    done = []

    def interrupt(*_):
        thread.submit(lambda: done.append("interrupting"))

    def submit():
        sys.setprofile(interrupt)
        thread.submit(lambda: done.append("interrupted"))
        sys.setprofile(None)

    caller = threading.Thread(target=submit, daemon=True)
    caller.start()
    caller.join(30)
    assert not caller.is_alive()
    thread.finish()
    assert done.count("interrupted") == 1
    assert done.count("interrupting") > 1


async def test_work_is_done_in_its_order(thread):
    done = []
    for number in range(20):
        thread.submit(lambda number=number: done.append(number))
    assert (await thread.run(threading.current_thread)).name == "device"
    assert done == list(range(20))


async def test_exceptions_are_raised_at_the_waiter(thread):
    def fail():
        raise ValueError("no such device")

    thread.submit(fail)
    with pytest.raises(ValueError, match="no such device"):
        await thread.run(fail)
    assert await thread.run(lambda: 5) == 5


async def test_a_cancelled_caller_leaves_nothing_behind(thread):
    held, begun = threading.Event(), []
    thread.submit(held.wait)
    task = asyncio.ensure_future(thread.run(lambda: begun.append(1)))
    task.cancel()
    await asyncio.sleep(0)
    held.set()
    await thread.run(int)
    assert begun == []


async def test_nothing_is_kept_of_what_is_done(thread):
    class Memory:
        def close(self):
            return self

    memory = Memory()
    watch = weakref.ref(memory)
    await thread.run(memory.close)
    thread.submit(memory.close)
    await thread.run(int)
    del memory
    assert watch() is None


def test_nothing_is_kept_of_what_has_failed(thread):
    class Memory:
        def close(self):
            raise ValueError("no such device")

    async def main():
        memory = Memory()
        watch = weakref.ref(memory)
        with pytest.raises(ValueError, match="no such device"):
            await thread.run(memory.close)
        await thread.run(int)
        del memory
        return watch()

    gc.disable()
    try:
        assert asyncio.run(main()) is None
    finally:
        gc.enable()


def test_work_after_the_end_is_not_done():
    thread, done = AsyncDriverThread(), []
    thread.submit(lambda: done.append(1))
    thread.close()
    thread.submit(lambda: done.append(2))
    assert done == [1]
