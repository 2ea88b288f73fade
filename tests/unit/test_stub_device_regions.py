"""A stub's regions: opened and closed on a thread of their own, and waited for by who needs them only."""

import pytest

from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

INVALID_VALUE = 1

# The driver opens nothing until `go` is set, and notes who called it.
START = """
import gc, threading, time
from gpubridge.cuda_ipc import DeviceSegment
regions = device.regions
go, callers = threading.Event(), []
original = DeviceSegment.open

def slow(*arguments):
    callers.append(threading.current_thread() is threading.main_thread())
    go.wait()
    return original(*arguments)

DeviceSegment.open = slow

def announce(number):
    return regions.announce({"region": number, "size": 1000, "handle": bytes(told[number]).hex(),
                             "events": "", "client": False}, [])
"""


@pytest.fixture
def others(machine):
    """Handles of two pieces of memory of another process, by their regions; each begins with its number."""
    with device_worker(machine) as owner:
        yield [
            None,
            *(
                owner.do(
                    f"s{n} = mine(1000, {n}); put(s{n}.pointer, bytes([{n}] * 8));"
                    f"answer = list(s{n}.handle)"
                )
                for n in (1, 2)
            ),
        ]


@pytest.fixture
def worker(stub_device_process, others):
    stub_device_process.do(START, others)
    return stub_device_process


def test_an_announcement_of_a_region_does_not_wait_until_it_is_open(worker, others):
    assert worker.do(
        "one = announce(1); answer = [regions.get(1) is one, one.size, len(one.view), go.is_set()]",
        others,
    ) == [True, 1000, 1000, False]
    assert worker.do("go.set(); answer = [read(one.pointer, 1)[0], callers]") == [1, [False]]


def test_use_of_an_open_region_does_not_wait_for_another(worker, others):
    worker.do("go.set(); one = announce(1); regions.wait_for([1]); go.clear()", others)
    assert worker.do(
        "two = announce(2); waiting = threading.Thread(target=regions.wait_for, args=([2],));"
        "waiting.start(); regions.wait_for([1, 77]);"
        "answer = [read(one.pointer, 1)[0], waiting.is_alive()]; go.set(); waiting.join();"
        "answer.append(read(two.pointer, 1)[0])",
        others,
    ) == [1, True, 2]


def test_a_region_that_cannot_be_opened_fails_who_needs_it_and_is_tried_anew(
    machine, worker, others
):
    machine.fail("cuIpcOpenMemHandle", INVALID_VALUE, nth=1)
    assert worker.do(
        """
go.set()
one, two = announce(1), announce(2)
regions.wait_for([2])
answer = [read(two.pointer, 1)[0]]
try:
    regions.wait_for([1])
except BridgeError as error:
    answer.append(error.call)
answer.append(read(one.pointer, 1)[0])
""",
        others,
    ) == [2, "cuIpcOpenMemHandle", 1]


def test_one_that_was_never_opened_is_told_of_as_closed(machine, worker, others):
    machine.fail("cuIpcOpenMemHandle", INVALID_VALUE)
    assert worker.do(
        """
go.set()
one = announce(1)
announce(1)
try:
    one.opened()
except BridgeError:
    pass
answer = [list(closed)]
gc.disable()
del one
regions.finish()
answer += [list(closed), regions.get(1) is None]
""",
        others,
    ) == [[], [[1, 2]], True]


def test_closing_waits_for_the_gpu_and_nobody_for_closing(machine, worker, others):
    assert worker.do(
        "go.set(); one = announce(1); regions.wait_for([1]); hold(stream); del one;"
        "device.reclaim(); device.check(); answer = [list(closed), released.is_set()]",
        others,
    ) == [[], False]
    # What comes for another region meanwhile is not lost.
    assert (
        worker.do("two = announce(2); released.set(); answer = read(two.pointer, 1)[0]", others)
        == 2
    )
    assert worker.do("regions.finish(); answer = list(closed)") == [[1, 1]]
    assert len(machine.calls("cuIpcCloseMemHandle")) == 1


def test_a_region_announced_again_while_it_is_closed_is_open_once(machine, worker, others):
    """A handle may be open once in a process, and the server counts how often it has told of it."""
    assert worker.do(
        """
go.set()
one = announce(1)
regions.wait_for([1])
# Another thread lets go of it: no lookup finds it any more, and it is not closed yet.
end = one._end
del one
answer = [regions.get(1) is None]
again = announce(1)
regions.wait_for([1])
del end
regions.finish()
answer += [list(closed), read(again.pointer, 1)[0]]
del again
regions.finish()
answer.append(list(closed))
""",
        others,
    ) == [True, [[1, 1]], 1, [[1, 1], [1, 1]]]
    assert len(machine.calls("cuIpcOpenMemHandle")) == 1
    assert len(machine.calls("cuIpcCloseMemHandle")) == 1


def test_the_end_closes_what_nobody_uses_and_waits_for_no_more(machine, worker, others):
    worker.do("go.set(); one = announce(1); regions.wait_for([1]); del one; device.close()", others)
    assert len(machine.calls("cuIpcCloseMemHandle")) == 1
