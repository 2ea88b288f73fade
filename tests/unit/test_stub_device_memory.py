"""A stub's device memory: what is over goes back when every stream that used it has passed."""

from collections import Counter

import pytest

OUT_OF_MEMORY, INVALID_HANDLE = 2, 400


@pytest.fixture
def worker(stub_device_process):
    return stub_device_process


def test_a_slot_returns_when_the_streams_that_used_it_have_passed(worker):
    assert worker.do(
        "data = device.allocate_device(whole); data.hand_out(stream); hold(stream); del data;"
        "device.reclaim(); answer = [room_for(whole), device.busy]"
    ) == [False, True]
    assert worker.do("released.set(); ok(d.cuStreamSynchronize(stream)); answer = room_for(whole)")


def test_a_lease_lasts_until_the_streams_that_used_it_have_passed(worker):
    said = worker.do(
        "view = memoryview(bytearray(8)); import weakref, numpy as np;"
        "array = np.zeros(8, np.uint8); watch = weakref.ref(array);"
        "data = device.borrowed((device.first_region.region, 256, 8, 0), memoryview(array), None); del array;"
        "answer = [data.pointer - device.first_region.pointer];"
        "data.hand_out(stream); hold(stream); del data; device.reclaim();"
        "answer.append(watch() is None)"
    )
    assert said == [256, False]
    assert worker.do("released.set(); passed(); answer = watch() is None")


LENT = """
import weakref, numpy as np
def lent(offset):
    array = np.zeros(8, np.uint8)
    ref = device.first_region.region, offset, 8, 0
    return device.borrowed(ref, memoryview(array), None), weakref.ref(array)
"""


@pytest.mark.parametrize("used", ["view", "first"])
def test_parts_that_lie_together_are_viewed_and_last_as_long_as_streams_use_them(worker, used):
    worker.do(LENT)
    assert worker.do(
        "first, a = lent(256); last, b = lent(264); view = device.join([first, last]);"
        "answer = [view.pointer - first.pointer, view.nbytes];"
        f"{used}.hand_out(stream); hold(stream); del first, last, view; device.reclaim();"
        "answer += [a() is None, b() is None]"
    ) == [0, 16, False, False]
    assert worker.do(
        "released.set(); passed(); answer = [a() is None, b() is None, *list(work)[2::4]]"
    ) == [True, True, 0, 0]


@pytest.mark.parametrize(
    "parts", ["lent(264)[0], lent(256)[0]", "lent(0)[0], lent(16)[0]", "lent(0)[0], slot"]
)
def test_parts_that_lie_apart_are_copied_once(worker, parts):
    worker.do(LENT + "slot = device.allocate_device(8)")
    assert worker.do(
        f"view = device.join([{parts}]); view.complete(); passed(); answer = list(work)[2::4]"
    ) == [16, 2]


def test_memory_that_nobody_gave_to_a_stream_returns_at_once_without_the_driver(worker):
    worker.do("calls = device.allocate_device(whole); del calls; device.reclaim()")
    assert worker.do("answer = room_for(whole)")


def test_a_stream_that_cannot_be_asked_any_more_is_waited_for_with_all_others(machine, worker):
    worker.do("data = device.allocate_device(whole); data.hand_out(stream); del data")
    machine.fail("cuEventRecord", INVALID_HANDLE, nth=1)
    assert worker.do("device.reclaim(); answer = room_for(whole)")
    assert machine.calls("cuCtxSynchronize", worker.pid)


def test_an_arena_that_is_not_shared_is_reported(worker):
    assert worker.do("answer = [device.shares_arena, said[0][0]]") == [False, "device_not_shared"]


@pytest.mark.parametrize(
    "begin",
    [
        (
            "target = memoryview(bytearray(64)); copies.read(data, target); copies.finish();"
            "answer = bytes(target) == bytes([7]) * 64"
        ),
        (
            "copy = copies.copy(data); copies.finish();"
            "answer = read(copy.pointer, 64) == bytes([7]) * 64"
        ),
        "copies.order(data); copies.finish(); answer = read(data.pointer, 64) == bytes([7]) * 64",
    ],
    ids=["read", "write", "order"],
)
def test_writes_on_a_stream_that_the_model_named_are_waited_for(worker, begin):
    worker.do(
        "data = device.allocate_device(64); data.hand_out(stream); copies = device.transfers();"
        "fill(data.pointer, 0, 64, stream); ok(d.cuStreamSynchronize(stream));"
        "hold(stream); fill(data.pointer, 7, 64, stream);"
        "threading.Timer(0.2, released.set).start()"
    )
    assert worker.do(begin)


CUPY = """
import sys, types

class Stream:
    # As CuPy's, it is destroyed with its object, which CuPy holds while it is current.
    def __init__(self):
        self.ptr = int(ok(d.cuStreamCreate(1)))
    def __del__(self):
        ok(d.cuStreamDestroy(self.ptr))

current = [Stream()]
sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(
    get_current_stream=lambda device=-1: current[0]))
"""


@pytest.mark.parametrize(
    "take", ["hand_out(current[0].ptr)", "hand_out(-1)", "hand_out(None)", "hand_out_unnamed()"]
)
def test_a_stream_that_was_local_to_the_model_lives_until_its_memory_is_back(worker, take):
    worker.do(CUPY)
    worker.do(
        f"data = device.allocate_device(whole); data.{take}; fill(data.pointer, 7, 64, current[0].ptr);"
        "current[0] = types.SimpleNamespace(ptr=0)"
    )
    # It is destroyed by now unless it is held, and to use it would break a rule.
    worker.do(
        "copies = device.transfers(); copies.order(data); del data; copies.finish(); passed()"
    )
    assert worker.do("answer = room_for(whole)")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        "copies.order(data); copies.finish(); assert read(data.pointer, 64) == sevens",
        "copy = copies.copy(data); copies.finish(); assert read(copy.pointer, 64) == sevens",
        "event = device.record_event([data], copies); copies.finish()",
        "released.set()",
    ],
    ids=["ordered", "copied", "handed on", "given up"],
)
def test_a_stream_of_an_unknown_owner_may_be_gone_while_its_memory_is_used(
    machine, worker, use, old
):
    """To use its handle would end the process."""
    machine.set(destroyed="crash")
    if old:
        machine.fail("cuCtxRecordEvent", 500)
    worker.do(
        "local = ok(d.cuStreamCreate(1)); data = device.allocate_device(whole // 2)\n"
        "data.hand_out(int(local)); hold(local); fill(data.pointer, 7, 64, local)\n"
        "ok(d.cuStreamDestroy(local)); threading.Timer(0.1, released.set).start()\n"
        f"copies = device.transfers(); sevens = bytes([7]) * 64; {use}\n"
        "data = copy = copies = None; device.reclaim(); passed()"
    )
    assert worker.do("answer = room_for(whole)")


BESIDE = """
class Framework:
    # A tensor of a library that is not known, on a stream.
    def __init__(self, stream, data):
        self.stream, self.data = stream, data
    def __dlpack_device__(self):
        return 2, 0
    def __dlpack__(self, stream=None, max_version=None):
        event = ok(d.cuEventCreate(2))
        ok(d.cuEventRecord(event, self.stream)); ok(d.cuStreamWaitEvent(stream, event, 0))
        return dlpack.make_capsule(self, self.data.pointer, "UINT8", (64,), (2, 0), max_version,
                                   read_only=False, copied=False)

from gpubridge.tensor import dlpack
held, free = new_stream(), new_stream()
slots = [device.allocate_device(64) for _ in range(2)]
for value, slot in enumerate(slots):
    fill(slot.pointer, 7 + value, 64, stream)
ok(d.cuStreamSynchronize(stream))
hold(held)
for slot, on in zip(slots, (held, free)):
    slot.hand_out(on)
slow, quick = slots
timer = threading.Timer(5, released.set); timer.start()
targets = [memoryview(bytearray(64)) for _ in range(2)]

def taken(slot, on):
    return dlpack.import_object(Framework(on, slot), device.stream, 0).memory

def answered():
    copies = device.transfers(); copies.read(quick, targets[1]); copies.finish()
    timer.cancel()
    return [released.is_set(), bytes(targets[1]) == bytes([8]) * 64]
"""


@pytest.mark.parametrize(
    "begin",
    [
        "first = device.transfers(); first.order(slow)",
        "first = device.transfers(); first.copy(slow); first.detach()",
        "copy = device.copy_on_device(slow)",
        "slow = taken(slow, held); quick = taken(quick, free)",
        "slow = taken(slow, held); copy = device.copy_on_device(slow); quick = taken(quick, free)",
        "del slow; slots.clear(); device.reclaim()",
        "copies = device.copies_on_device([slow] * 5)",
    ],
    ids=["ordered", "left", "copied", "taken", "taken and copied", "given up", "copied often"],
)
def test_a_response_does_not_wait_for_streams_behind_tensors_of_others(worker, begin):
    worker.do(BESIDE + begin)
    assert worker.do("answer = answered(); released.set()") == [False, True]


def test_more_copies_than_streams_share_them_in_order(machine, worker):
    worker.do(BESIDE)
    made = len(machine.calls("cuStreamCreate", worker.pid))
    worker.do("copies = [device.copy_on_device(slow) for _ in range(30)]")
    assert len(machine.calls("cuStreamCreate", worker.pid)) == made
    worker.do("released.set(); timer.cancel(); answers = []")
    assert worker.do(
        "for copy in copies:\n"
        "    device.copy_to_host(copy, targets[0])\n"
        "    answers.append(bytes(targets[0]) == bytes([7]) * 64)\n"
        "answer = all(answers)"
    )


def test_memory_of_a_copy_stays_until_it_is_made(worker):
    worker.do(
        "half = whole // 2; data = device.allocate_device(half); fill(data.pointer, 7, half, stream);"
        "ok(d.cuStreamSynchronize(stream)); held = int(ok(d.cuStreamCreate(1))); hold(held);"
        "data.ready = device.stream.mark(held); copy = device.copy_on_device(data);"
        "del data, copy; device.reclaim()"
    )
    assert worker.do("answer = [room_for(512), device.busy]") == [False, True]
    worker.do("released.set(); passed()")
    assert worker.do("answer = [device.busy, room_for(whole)]") == [False, True]


USER_MEMORY = """
import weakref
from gpubridge.tensor.device_bytes import DeviceBytes
class Owner: pass
pointer = int(ok(d.cuMemAlloc(64)))
fill(pointer, 7, 64, stream); ok(d.cuStreamSynchronize(stream))
owner = Owner(); watch = weakref.ref(owner)
held = int(ok(d.cuStreamCreate(1))); hold(held)
data = DeviceBytes(pointer, 64, 0, owner, device.stream.mark(held))
data.owner_streams = {stream: []}
copy = device.copy_on_device(data); del data, owner
"""


def test_a_librarys_next_writes_come_after_the_copy(worker):
    worker.do(USER_MEMORY + "fill(pointer, 9, 64, stream); device.reclaim()")
    worker.do("threading.Timer(0.2, released.set).start(); ok(d.cuStreamSynchronize(stream))")
    assert worker.do("passed(); answer = read(copy.pointer, 64) == bytes([7]) * 64")


def test_a_library_has_its_memory_back_when_the_copy_of_it_is_made(worker):
    assert worker.do(USER_MEMORY + "device.reclaim(); answer = watch() is None") is False
    worker.do("released.set(); ok(d.cuStreamSynchronize(stream))")
    assert worker.do("passed(); answer = watch() is None") is True


def test_a_stream_that_a_library_has_destroyed_holds_nothing_up(machine, worker):
    # The first is for the copy.
    machine.fail("cuStreamWaitEvent", INVALID_HANDLE, nth=2)
    worker.do(USER_MEMORY + "released.set()")
    assert worker.do("passed(); answer = read(copy.pointer, 64) == bytes([7]) * 64")


def test_reads_into_memory_of_the_model_go_in_pinned_pieces(machine, worker):
    """The model's memory is not: the driver would copy it alone, and burn a processor meanwhile."""
    assert worker.do(
        "import numpy as np\n"
        "data = device.allocate_device(whole); fill(data.pointer, 0, whole, stream)\n"
        "fill(data.pointer + 10, 7, whole - 10, stream); data.hand_out(stream); hold(stream)\n"
        "target = np.ones(whole, np.uint8); threading.Timer(0.2, released.set).start()\n"
        "device.copy_to_host(data, target.data)\n"
        "answer = [released.is_set(), bool((target[10:] == 7).all()), int(target[:10].sum())]"
    ) == [True, True, 0]
    assert worker.do("device.reclaim(); answer = list(work) == [0, whole, 0, 0, 0, 1, 0, 0, 1]")
    copies = machine.calls("cuMemcpyDtoHAsync")
    assert {call.arguments[1] for call in copies} == {1}
    assert machine.activity(worker.pid).spun == 0
    worker.do("device.close()")
    assert len(machine.calls("cuMemHostAlloc")) == len(machine.calls("cuMemFreeHost"))


@pytest.mark.parametrize("nth", [2, 5, 6])
def test_a_device_that_cannot_be_made_leaves_nothing_behind(machine, worker, nth):
    def made_less_gone():
        counted = Counter(call.name for call in machine.calls(pid=worker.pid) if not call.result)
        return [
            counted[made] - counted[gone]
            for made, gone in (
                ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
                ("cuStreamCreate", "cuStreamDestroy"),
            )
        ]

    worker.do(
        "of = StubGpu(device.uuid, [], whole, os.getpid())\n"
        "again = StubDevice(of, 0, work, cells, None, lambda *what: None, lambda: None,"
        "lambda *what: None)\n"
        "def pinning(): return sum(each.name == 'pinning' for each in threading.enumerate())\n"
        "def ordinal():\n"
        "    try: return again.ordinal\n"
        "    except BridgeError as error: return error.code.name"
    )
    before, threads = made_less_gone(), worker.do("answer = pinning()")
    machine.fail("cuStreamCreate", OUT_OF_MEMORY, nth=nth)
    assert worker.do("answer = [ordinal(), pinning()]") == ["UNAVAILABLE", threads]
    assert made_less_gone() == before
    machine.heal()
    assert worker.do("answer = [ordinal(), pinning()]") == [0, threads + 1]
    worker.do("again.close()")
    assert worker.do("answer = pinning()") == threads
