"""Device memory that one process owns and others open: rules, refusals, and nothing left behind."""

import pytest

from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

BLOCK = 2 << 20
OWN = "segment = mine(1000, 7); put(segment.pointer, bytes([5] * 8)); answer = list(segment.handle)"
OPEN = """
segment = DeviceSegment.open(context, 7, bytes(told), 1000)
answer = [segment.region, segment.size, *seen(segment.pointer + 7)]
"""


def test_memory_is_opened_once_and_seen(machine):
    with device_worker(machine) as owner, device_worker(machine) as other:
        handle = owner.do(OWN)
        assert machine.used(0) == BLOCK  # whole blocks: a handle lays open no neighbours
        assert owner.do("answer = [segment.region, segment.size]") == [7, BLOCK]
        assert other.do(OPEN, handle) == [7, 1000, 5]
        other.do(f"put(segment.pointer + {BLOCK} - 1, b'x')")
        assert owner.do(f"answer = seen(segment.pointer + {BLOCK} - 1)") == [ord("x")]
        assert other.do("answer = segment.uuid") == owner.do("answer = segment.uuid")
        other.do("segment.close(); segment.close()")
        owner.do("segment.close(); segment.close()")
    assert machine.used(0) == 0
    for name in ("cuMemFree", "cuIpcCloseMemHandle", "cuIpcGetMemHandle"):
        assert len(machine.calls(name)) == 1


def test_out_of_memory_is_unavailable_and_takes_nothing(machine):
    machine.set_memory(3 * BLOCK)
    with device_worker(machine) as worker:
        worker.do("first = mine(1)")
        with pytest.raises(RuntimeError, match=r"cuMemAlloc failed.*device-arena-bytes"):
            worker.do(f"mine({2 * BLOCK} + 1)")
        assert machine.used(0) == BLOCK
        worker.do(f"second = mine({2 * BLOCK})")
        assert machine.used(0) == 3 * BLOCK


def test_memory_that_cannot_be_shared_is_given_back(machine):
    machine.fail("cuIpcGetMemHandle", 801)
    with device_worker(machine) as worker:
        with pytest.raises(RuntimeError, match=r"cuIpcGetMemHandle.*no legacy CUDA IPC"):
            worker.do("mine(1)")
        assert machine.used(0) == 0


def test_the_own_handle_is_refused_with_what_to_do(machine):
    with (
        device_worker(machine) as worker,
        pytest.raises(RuntimeError, match=r"INVALID_CONTEXT.*PID namespace"),
    ):
        worker.do(OPEN, worker.do(OWN))


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        ([1] * 64, "INVALID_VALUE"),
        ([1] * 63, "expected a CUDA IPC handle of 64 bytes, got 63"),
        ([], "expected a CUDA IPC handle of 64 bytes, got 0"),
    ],
)
def test_malformed_handles_are_refused(machine, handle, text):
    with device_worker(machine) as worker, pytest.raises(RuntimeError, match=text):
        worker.do(OPEN, handle)
    assert machine.calls("cuIpcCloseMemHandle") == []


@pytest.mark.parametrize("size", [0, -1, BLOCK + 1])
def test_a_wrong_size_is_refused_and_nothing_stays_open(machine, size):
    with device_worker(machine) as owner, device_worker(machine) as other:
        handle = owner.do(OWN)
        with pytest.raises(RuntimeError, match=f"expected .*{size}"):
            other.do(OPEN.replace("1000", str(size)), handle)
        opened = machine.calls("cuIpcOpenMemHandle")
        assert len(opened) == len(machine.calls("cuIpcCloseMemHandle")) == (size > 0)


def test_memory_of_another_device_is_refused(machine):
    with (
        device_worker(machine) as owner,
        device_worker(machine, 1) as other,
        pytest.raises(RuntimeError, match=r"INVALID_DEVICE.*on another GPU"),
    ):
        other.do(OPEN, owner.do(OWN))


def test_a_segment_of_a_lost_context_says_so_once(machine):
    with device_worker(machine) as worker:
        worker.do(OWN)
        machine.fail("cuMemFree", 700)
        with pytest.raises(RuntimeError, match=r"ILLEGAL_ADDRESS.*started again"):
            worker.do("segment.close()")
        worker.do("segment.close()")
    assert len(machine.calls("cuMemFree")) == 1


def test_opening_and_closing_leaves_the_current_context_alone(machine):
    with device_worker(machine) as owner, device_worker(machine) as other:
        other.do("DeviceContext(list_devices()[1]).make_current()")
        other.do(OPEN, owner.do(OWN))
        other.do("segment.close()")
        assert other.do("answer = int(ok(d.cuCtxGetDevice()))") == 1
