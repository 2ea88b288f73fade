"""Events that a stub shows: while its streams wait for them, neither before nor after."""

import pytest

from tests.simcuda.processes import running_worker
from tests.waits import polling

pytest.importorskip("cuda.bindings")

# `told` is the maker's handle; `shown` what the server sees.
SETUP = """
from gpubridge.cuda_ipc import CopyStream, DeviceContext, SharedEvents, list_devices
from gpubridge.host_shm import Segment
from gpubridge.stub.device.event_waits import EventWaits
from gpubridge.transport.control import ControlPage
import time
context = DeviceContext(list_devices()[0])
context.make_current()
copies = CopyStream(context)
stream = int(ok(d.cuStreamCreate(1)))
page = ControlPage(Segment.create(0, ControlPage.SIZE))
waits = EventWaits(page.events)
events = SharedEvents.open(context, [bytes(told)])

def shown():
    waits.look()
    looked, *names = page.events.awaited
    return [looked > 0, [name for name in names if name]]
"""
MAKER = """
from gpubridge.cuda_ipc import CopyStream, DeviceContext, SharedEvents, list_devices
context = DeviceContext(list_devices()[0])
events = SharedEvents.create(context, 1)
copies = CopyStream(context)
hold(copies.handle)
events.record(0, copies.handle)
answer = list(events.handles[0])
"""


@pytest.fixture
def workers(machine):
    with running_worker(machine) as maker, running_worker(machine) as waiter:
        maker.do("start()")
        waiter.do("start()")
        waiter.do(SETUP, maker.do(MAKER))
        yield maker, waiter


def test_a_wait_is_shown_while_it_lasts(workers):
    maker, waiter = workers
    waiter.do("hold(stream); waits.order(77, events, 0, stream, copies)")
    # The stream has not come to it.
    assert waiter.do("answer = shown()") == [True, []]
    waiter.do(f"released.set()\n{polling('shown() == [True, [77]]')}")
    maker.do("released.set()")
    waiter.do("ok(d.cuStreamSynchronize(stream))")
    assert waiter.do("answer = shown()") == [False, []]


def test_a_thread_looks_while_others_wait(workers):
    maker, waiter = workers
    waiter.do(
        "import threading\n"
        "def wait():\n"
        "    with waits.by_thread(78): events.wait(0, 'another')\n"
        "thread = threading.Thread(target=wait); thread.start()\n"
        + polling("78 in list(page.events.awaited)")
    )
    maker.do("released.set()")
    waiter.do("thread.join()\n" + polling("78 not in list(page.events.awaited)"))
    assert waiter.do("answer = page.events.awaited[0]") == 0


def test_waits_that_are_over_are_swept(workers):
    maker, waiter = workers
    maker.do("released.set()")
    waiter.do("waits.order(79, events, 0, stream, copies); ok(d.cuStreamSynchronize(stream))")
    assert waiter.do("waits.sweep(); answer = page.events.awaited[0]") == 0
