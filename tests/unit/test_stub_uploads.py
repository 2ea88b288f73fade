"""Uploads of inputs: what waits for them, what does not, and what they hold until they are done."""

from types import SimpleNamespace

import pytest

from gpubridge.stub.uploading import UploadingExecutor

START = """
import time, weakref, numpy as np
from gpubridge.stub.device.input_prefetch import InputPrefetcher
from gpubridge.transport.leases import BorrowedMemory
from gpubridge.transport.context import RequestContext
from gpubridge.transport.records import Record
from gpubridge.transport.signatures import Signature, TensorSpec
from types import SimpleNamespace

uploads = device.uploads
part = whole // 4

def source(value, nbytes=part):
    place = int(ok(d.cuMemHostAlloc(nbytes, 0)))
    array = np.frombuffer((ctypes.c_char * nbytes).from_address(place), np.uint8)
    array[:] = value
    return array

def begin(*arrays):
    slots = [device.allocate_device(array.nbytes) for array in arrays]
    uploads.begin([(memoryview(array), slot) for array, slot in zip(arrays, slots)])
    return slots

def consumed(data, nbytes=part):
    # As a model does: its stream waits for the data, then reads it.
    data.hand_out(stream)
    target = source(0, nbytes)
    ok(d.cuMemcpyDtoHAsync(target.ctypes.data, data.pointer, nbytes, stream))
    return target

# What the server lends: eight tensors' bytes, each under a lease of its own.
memory = source(0, 8 * part)
table = bytearray(8)
borrowed = BorrowedMemory(memoryview(table))
borrowed.add(5, memoryview(memory))

def record(ticket, count=1, nbytes=part, client=None, datatype="UINT8", region=5):
    table[ticket] = 1
    memory[ticket * part :][:nbytes] = ticket + 1
    tensors = [TensorSpec("IN%d" % i, datatype, 1, 1) for i in range(count)]
    refs = [(region, ticket * part, nbytes, ticket)] * count
    return Record(ticket, Signature(tensors, ()), ((nbytes,),) * count, RequestContext(client=client), 0, "", refs)

def ahead(records, inputs):
    inputs.prefetch(records)
    return sorted(inputs._next.tensors)

"""

INVALID_VALUE = 1
ILLEGAL_ADDRESS = 700


@pytest.fixture
def worker(stub_device_process):
    stub_device_process.do(START)
    return stub_device_process


@pytest.fixture
def ahead(worker):
    worker.do("inputs = InputPrefetcher(device, lambda *what: said.append(what[0]), borrowed)")
    # Its arena is there, and what was said of that.
    worker.do("device.first_region; said.clear()")
    return worker


def test_a_stream_that_is_to_read_waits_for_the_upload(worker):
    assert worker.do(
        "hold(uploads.stream.handle); (data,) = begin(source(7)); target = consumed(data);"
        "time.sleep(0.1); answer = [bool(target.any())]; released.set();"
        "ok(d.cuStreamSynchronize(stream)); answer.append(bool((target == 7).all()))"
    ) == [False, True]


def test_a_stream_does_not_wait_for_the_uploads_of_the_next_request(worker):
    """Else nothing would overlap: the next one's have begun by the time the model looks at its own."""
    assert worker.do(
        "(data,) = begin(source(7)); hold(uploads.stream.handle); (other,) = begin(source(9));"
        "target = consumed(data); ok(d.cuStreamSynchronize(stream));"
        "answer = [released.is_set(), bool((target == 7).all())]; released.set()"
    ) == [False, True]


def test_a_response_does_not_wait_for_the_uploads_of_the_next_request(worker):
    worker.do(
        "(data,) = begin(source(7)); hold(uploads.stream.handle); (other,) = begin(source(9));"
        "timer = threading.Timer(5, released.set); timer.start()"
    )
    assert worker.do(
        "target = source(0); copies = device.transfers(); copies.read(data, memoryview(target));"
        "del data; copies.finish();"
        "answer = [released.is_set(), bool((target == 7).all())]; released.set(); timer.cancel()"
    ) == [False, True]


def test_a_response_does_not_wait_for_uploads_that_are_given_up(worker):
    """Their slots are given up before they are filled: the model has not looked at them."""
    worker.do("other = device.allocate_device(64); hold(uploads.stream.handle); begin(source(7))")
    worker.do("timer = threading.Timer(5, released.set); timer.start(); device.reclaim()")
    assert worker.do(
        "target = source(0, 64); copies = device.transfers();"
        "copies.read(other, memoryview(target)); copies.finish();"
        "answer = [released.is_set(), room_for(whole - part)]; del other;"
        "released.set(); timer.cancel(); passed(); answer.append(room_for(whole))"
    ) == [False, False, True]


def test_an_upload_holds_its_source_until_it_is_done(worker):
    assert worker.do(
        "array = source(7); watch = weakref.ref(array); hold(uploads.stream.handle);"
        "slots = begin(array); del array, slots; device.reclaim(); device.reclaim();"
        "answer = [watch() is not None, device.busy]; released.set(); passed();"
        "answer += [watch() is None, device.busy]"
    ) == [True, True, True, False]


def test_a_slot_that_is_given_up_is_nobody_elses_before_its_upload_is_done(worker):
    assert worker.do(
        "hold(uploads.stream.handle); slots = begin(source(7), source(8)); slots.clear();"
        "answer = [room_for(whole)]; released.set(); passed(); answer.append(room_for(whole))"
    ) == [False, True]


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_copy_leaves_the_sources_of_others_held(machine, worker, nth):
    worker.do("first, second = source(1), source(2); watch = weakref.ref(first)")
    machine.fail("cuMemcpyHtoDAsync", INVALID_VALUE, nth=nth)
    assert worker.do(
        """
hold(uploads.stream.handle)
try:
    begin(first, second)
except BridgeError as error:
    told = error.call
del first, second
device.reclaim()
answer = [told, watch() is not None, room_for(whole)]
released.set(); passed()
answer += [watch() is None, room_for(whole)]
"""
    ) == ["cuMemcpyHtoDAsync", True, False, True, True]


def test_uploads_without_an_event_are_waited_for(machine, worker):
    machine.fail("cuEventRecord", INVALID_VALUE, nth=1)
    assert worker.do(
        "(data,) = begin(source(7)); answer = [data.ready is None, uploads.busy,"
        "read(data.pointer, part) == bytes([7]) * part]"
    ) == [True, False, True]
    assert worker.do("device.reclaim(); answer = work[8]") == 1


def test_uploads_are_counted_with_the_other_copies(worker):
    worker.do("slots = begin(source(7, 64), source(8, 64)); target = source(0, 64)")
    worker.do("device.copy_to_host(slots[0], memoryview(target))")
    assert worker.do("answer = list(work)") == [128, 64, 0, 0, 2, 1, 0, 0, 1]


def test_at_the_end_uploads_that_nobody_waits_for_are_waited_for(worker):
    """Memory that is still read must not be unpinned."""
    worker.do(
        "threading.Timer(0.2, released.set).start(); hold(uploads.stream.handle); begin(source(7))"
    )
    assert worker.do("device.close(); answer = [released.is_set(), uploads.busy]") == [True, False]


def test_inputs_placed_ahead_are_copied_once(ahead):
    assert ahead.do("answer = ahead([record(0), record(1)], inputs)") == [0, 1]
    assert ahead.do(
        "inputs.begin_batch([record(0), record(1)]); tensors = inputs.take(0) + inputs.take(1);"
        "targets = [consumed(t._device_bytes) for t in tensors];"
        "ok(d.cuStreamSynchronize(stream)); passed();"
        "answer = [[int(t[0]), int(t[-1])] for t in targets] + [work[4], inputs.take(0)]"
    ) == [[1, 1], [2, 2], 2, None]


def test_inputs_that_do_not_fit_ahead_are_placed_in_turn(ahead):
    ahead.do("held = device.allocate_device(3 * part)")
    assert ahead.do("answer = ahead([record(0), record(1)], inputs)") == [0]
    assert ahead.do("answer = said") == ["device_inputs_in_turn"]
    assert ahead.do(
        "del held; device.reclaim(); inputs.begin_batch([record(0), record(1)]);"
        "answer = [list(t.shape()) for ticket in (0, 1) for t in inputs.take(ticket)] == [[part]] * 2"
    )


def test_a_models_own_allocation_precedes_inputs_placed_ahead(ahead):
    assert ahead.do("answer = ahead([record(0), record(1)], inputs)") == [0, 1]
    # More than what is left, so that its model would fail for the sake of one that is not its turn.
    assert ahead.do(
        "data = device.allocate_device(3 * part); answer = [device.first_region.size >= 4 * part, said]"
    ) == [True, ["device_inputs_in_turn"]]
    assert ahead.do(
        "del data; inputs.begin_batch([record(0)]); (tensor,) = inputs.take(0);"
        "target = consumed(tensor._device_bytes); ok(d.cuStreamSynchronize(stream));"
        "answer = bool((target == 1).all())"
    )


def test_after_want_of_room_nothing_is_placed_ahead_for_a_while(ahead):
    ahead.do("held = device.allocate_device(whole); ahead([record(0)], inputs); del held")
    ahead.do("device.reclaim()")
    assert (
        ahead.do(
            """
answer = []
for _ in range(20):
    answer.append(len(ahead([record(0)], inputs)))
    inputs.begin_batch([]); inputs.end_batch(); passed()
"""
        )
        == [0] * 16 + [1] * 4
    )


def test_memory_that_was_looked_at_goes_back_after_its_copy(ahead):
    assert ahead.do(
        "hold(uploads.stream.handle); ahead([record(0), record(1)], inputs); inputs.begin_batch([]);"
        "answer = [inputs.has_views(0), inputs.has_views(2)];"
        "inputs.end_batch(); device.reclaim(); answer.append(list(table)[:2]);"
        "released.set(); passed(); answer.append(list(table)[:2])"
    ) == [True, False, [1, 1], [0, 0]]


def test_withdrawn_and_cancelled_requests_were_looked_at(ahead):
    assert ahead.do(
        "hold(uploads.stream.handle); ahead([record(0)], inputs); device.evict_prefetched();"
        "inputs.begin_batch([]); answer = [inputs.take(0), inputs.has_views(0)];"
        "device.reclaim(); answer.append(table[0]); released.set(); passed();"
        "answer.append(table[0])"
    ) == [None, True, 1, 0]


@pytest.mark.parametrize(
    "given",
    [
        "datatype='BYTES'",
        "client={'in': [0]}",
        "region=device.first_region.region",
        "nbytes=0",
        "nbytes=whole + 1",
    ],
)
def test_only_what_is_plain_is_placed_ahead(ahead, given):
    assert ahead.do(f"answer = ahead([record(0, {given})], inputs)") == []
    assert ahead.do("inputs.begin_batch([]); answer = [inputs.has_views(0), work[4]]") == [False, 0]


def test_an_upload_that_fails_ahead_fails_its_request_and_no_other(machine, ahead):
    machine.fail("cuMemcpyHtoDAsync", INVALID_VALUE, nth=2)
    assert ahead.do("answer = ahead([record(0), record(1), record(2)], inputs)") == [0, 2]
    assert ahead.do(
        "inputs.begin_batch([record(0), record(1), record(2)]);"
        "answer = [None if inputs.failure(t) is None else inputs.failure(t).call for t in range(3)]"
        "+ [inputs.take(1)]"
    ) == [None, "cuMemcpyHtoDAsync", None, None]


def test_a_device_that_is_lost_ahead_is_found_out_by_what_runs(machine, ahead):
    machine.fail("cuMemcpyHtoDAsync", ILLEGAL_ADDRESS, nth=1)
    assert ahead.do("answer = ahead([record(0)], inputs)") == []
    assert ahead.do("inputs.begin_batch([]); answer = inputs.failure(0)") is None


def test_a_cancelled_request_is_released_once_no_copy_reads_it():
    executor = object.__new__(UploadingExecutor)
    executor._inputs = SimpleNamespace(has_views={1}.__contains__)
    executor._control = SimpleNamespace(lent=bytearray((1, 1)))
    for ticket in (0, 1):
        executor._release(ticket)
    assert list(executor._control.lent) == [0, 1]
