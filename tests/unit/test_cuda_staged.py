"""Copies of pageable memory by way of pinned pieces: right, several at once, and never more of them."""

import pytest

pytest.importorskip("cuda.bindings")

PIECE = 64 << 10
NBYTES = 10 * PIECE + 123
OUT_OF_MEMORY, INVALID_VALUE = 2, 1

START = f"""
import time, weakref
import numpy as np
import gpubridge.cuda_ipc.staged as staged
staged.PIECE_BYTES = {PIECE}
copies = StagedCopies(context)
segment = mine({2 * NBYTES})
source = np.random.default_rng(1).integers(0, 256, {NBYTES}, np.uint8)
target = np.zeros({NBYTES}, np.uint8)

def both_ways(source, target, offset=0):
    at = segment.pointer + offset
    middle = {NBYTES} // 3
    copies.to_device([(at, source.data[:middle]), (at + middle, source.data[middle:].toreadonly())])
    copies.to_host([(at, target.data[:7]), (at + 7, target.data[7:7]), (at + 7, target.data[7:])])
    return bool((source == target).all())
"""


def test_copies_are_right_and_in_pinned_pieces(machine, worker):
    assert worker.do("answer = both_ways(source, target)") is True
    made = machine.calls("cuMemcpyHtoDAsync") + machine.calls("cuMemcpyDtoHAsync")
    assert all(call.arguments[0] <= PIECE and call.arguments[1] == 1 for call in made)
    assert sum(call.arguments[0] for call in made) == 2 * NBYTES
    assert machine.activity(worker.pid).spun == 0
    pieces = len(machine.calls("cuMemHostAlloc"))
    assert 1 <= pieces <= 8
    worker.do("for _ in range(5): both_ways(source, target)")
    assert len(machine.calls("cuMemHostAlloc")) <= 8
    worker.do("copies.close(); copies.close()")
    assert len(machine.calls("cuMemFreeHost")) == len(machine.calls("cuMemHostAlloc"))


def test_pieces_are_on_their_way_while_others_are(machine, worker):
    worker.do("both_ways(source, target); context.make_current(); hold(copies._stream.handle)")
    before = len(machine.calls("cuMemcpyDtoHAsync"))
    worker.do(
        "thread = threading.Thread(target=copies.to_host, args=([(segment.pointer, target.data)],))\n"
        "thread.start()"
    )
    while len(machine.calls("cuMemcpyDtoHAsync")) < before + 4:
        assert worker.do("answer = thread.is_alive()")
    worker.do("released.set(); thread.join()")


def test_many_may_copy_at_once_with_the_same_pieces(machine, worker):
    assert (
        worker.do(
            """
answer = []
def work(number):
    given = np.random.default_rng(number).integers(0, 256, NBYTES, np.uint8)
    taken = np.zeros(NBYTES, np.uint8)
    at = theirs[number].pointer
    for _ in range(5):
        copies.to_device([(at, given.data)]); taken[:] = 0; copies.to_host([(at, taken.data)])
        answer.append(bool((given == taken).all()))
theirs = [mine(NBYTES, number + 2) for number in range(6)]
threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
for each in threads: each.start()
for each in threads: each.join()
""".replace("NBYTES", str(NBYTES))
        )
        == [True] * 30
    )
    assert len(machine.calls("cuMemHostAlloc")) <= 8


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord"])
def test_a_failure_is_that_of_its_copy_only(machine, worker, call):
    worker.do("both_ways(source, target)")
    machine.fail(call, INVALID_VALUE, nth=3)
    refused = worker.do(
        "watch = weakref.ref(target)\n"
        "try: answer = [both_ways(source, target)]\n"
        "except CudaError as error: answer = [error.call]\n"
        f"del target; answer.append(watch() is None); target = np.zeros({NBYTES}, np.uint8)"
    )
    # Without an event the stream itself is asked.
    assert refused == [True if call == "cuEventRecord" else call, True]
    machine.heal()
    assert worker.do("answer = both_ways(source, target)") is True


def test_copies_are_right_without_pinned_memory(machine, worker):
    machine.fail("cuMemHostAlloc", OUT_OF_MEMORY)
    assert worker.do("answer = both_ways(source, target)") is True
    machine.heal()
    worker.do("copies.close()")
    assert machine.calls("cuMemFreeHost") == []


def test_a_lost_context_ends_every_copy(machine, worker):
    worker.do("both_ways(source, target)")
    machine.fail("cuMemcpyDtoHAsync", 700)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
            worker.do("copies.to_host([(segment.pointer, target.data)])")
