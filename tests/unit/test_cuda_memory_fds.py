"""Device memory that crosses by descriptors: rules, refusals, and nothing left behind."""

import pytest

from tests.simcuda.processes import hand_over
from tests.unit.cuda_workers import device_worker

pytest.importorskip("cuda.bindings")

BLOCK = 2 << 20
OWN = f"""
segment = DeviceSegment.allocate(context, 7, 1000, by_fd=True)
put(segment.pointer + {BLOCK} - 8, bytes([5] * 8))
answer = [segment.region, segment.size, list(segment.handle), len(segment.fds)]
"""
OPEN = f"segment = DeviceSegment.open_fd(context, 7, fd, {BLOCK}); os.close(fd)\n"
# A process has no descriptors and no mappings but those that it had before.
LEFT = "context.close(); answer = sorted(set(os.listdir('/proc/self/fd')) - before)"
BEFORE = "before = set(os.listdir('/proc/self/fd'))"
PARTS = (
    "cuMemGetAllocationGranularity",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
)


def test_memory_is_mapped_and_seen_and_lives_until_the_last_has_closed_it(machine, tmp_path):
    with device_worker(machine) as owner, device_worker(machine) as other:
        owner.do(BEFORE)
        other.do(BEFORE)
        assert owner.do(OWN) == [7, BLOCK, [], 1]
        hand_over(owner, "segment.fds[0]", other, tmp_path / "socket")
        other.do(OPEN)
        assert other.do(f"answer = seen(segment.pointer + {BLOCK} - 1)") == [5]
        other.do("put(segment.pointer, b'x')")
        assert owner.do("answer = seen(segment.pointer)") == [ord("x")]
        assert other.do("answer = [segment.fds, segment.uuid]") == [
            [],
            owner.do("answer = segment.uuid"),
        ]
        assert machine.used(0) == BLOCK
        owner.do("segment.close(); segment.close()")
        assert owner.do("answer = segment.fds") == []
        # Unlike what a handle names.
        assert other.do("answer = seen(segment.pointer)") == [ord("x")]
        assert machine.used(0) == BLOCK
        other.do("segment.close(); segment.close()")
        assert machine.used(0) == 0
        # The driver says so if a range, a mapping or a handle is left when a context goes.
        assert owner.do(LEFT) == []
        assert other.do(LEFT) == []


@pytest.mark.parametrize("call", PARTS)
def test_memory_that_cannot_be_shared_is_given_back(machine, call):
    machine.fail(call, 801)
    with device_worker(machine) as worker:
        worker.do(BEFORE)
        with pytest.raises(RuntimeError, match=f"{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
            worker.do(OWN)
        assert machine.used(0) == 0
        assert worker.do(LEFT) == []


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", *PARTS[3:]])
def test_memory_that_cannot_be_opened_is_left_as_it_was(machine, tmp_path, call):
    with device_worker(machine) as owner, device_worker(machine) as other:
        owner.do(OWN)
        hand_over(owner, "segment.fds[0]", other, tmp_path / "socket")
        machine.fail(call, 801)
        with pytest.raises(RuntimeError, match=f"{call} failed: CUDA_ERROR_NOT_SUPPORTED"):
            other.do(OPEN)
        machine.heal()
        other.do("os.close(fd); context.close()")
        owner.do("segment.close()")
        assert machine.used(0) == 0


def test_out_of_memory_is_unavailable_and_takes_nothing(machine):
    machine.set_memory(BLOCK)
    with device_worker(machine) as worker:
        code = (
            f"answer = refusal(lambda: DeviceSegment.allocate(context, 1, {BLOCK} + 1, by_fd=True))"
        )
        kind, name, text = worker.do(code)
        assert (kind, name) == ("CudaError", "UNAVAILABLE")
        assert "device-arena-bytes" in text
        worker.do(OWN)


@pytest.mark.parametrize("code", ["fd = os.open('/dev/null', 0)", "fd = 999"])
def test_a_descriptor_of_no_memory_is_refused(machine, code):
    with (
        device_worker(machine) as worker,
        pytest.raises(RuntimeError, match="not one of device memory"),
    ):
        worker.do(f"{code}\n{OPEN}")


@pytest.mark.parametrize("size", [BLOCK - 1, 2 * BLOCK])
def test_a_wrong_size_is_refused_and_nothing_stays_open(machine, tmp_path, size):
    with device_worker(machine) as owner, device_worker(machine) as other:
        owner.do(OWN)
        hand_over(owner, "segment.fds[0]", other, tmp_path / "socket")
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            other.do(OPEN.replace(str(BLOCK), str(size)))
        other.do("os.close(fd); context.close()")


@pytest.mark.parametrize("peers", [False, True])
def test_another_device_opens_it_where_it_reaches_it(machine, tmp_path, peers):
    if peers:
        machine.allow_peers()
    with device_worker(machine) as owner, device_worker(machine, 1) as other:
        owner.do(OWN)
        hand_over(owner, "segment.fds[0]", other, tmp_path / "socket")
        if not peers:
            with pytest.raises(RuntimeError, match=r"cuMemSetAccess.*on another GPU"):
                other.do(OPEN)
            return
        other.do(OPEN)
        assert other.do(f"answer = seen(segment.pointer + {BLOCK} - 1)") == [5]


def test_another_device_copies_to_it_only_when_it_may(machine):
    machine.allow_peers()
    with device_worker(machine) as worker:
        worker.do(OWN + "far = DeviceContext(list_devices()[1]); segment.allow_peer(far)")
        worker.do(
            "source = DeviceSegment.allocate(far, 8, 1, by_fd=True); copies = CopyStream(far)\n"
            "with far.pushed(): fill(source.pointer, 9, 64); ok(d.cuCtxSynchronize())\n"
            "copies.p2p(segment.pointer, context, source.pointer, 64); copies.wait()"
        )
        assert worker.do("answer = seen(segment.pointer, 64)") == [9] * 64


def test_a_segment_of_a_lost_context_says_so_once(device_process, machine):
    device_process.do(OWN)
    machine.fail("cuCtxSynchronize", 700)
    with pytest.raises(RuntimeError, match=r"ILLEGAL_ADDRESS.*started again"):
        device_process.do("segment.close()")
    device_process.do("segment.close()")
    # No other process gets a descriptor any more.
    assert device_process.do("answer = segment.fds") == []


def test_closing_waits_for_what_still_runs_there(device_process):
    device_process.do(
        OWN + "context.make_current(); stream = ok(d.cuStreamCreate(1)); hold(stream)"
    )
    device_process.do(
        "fill(segment.pointer, 1, 64, stream)\n"
        "threading.Timer(0.2, released.set).start(); segment.close()"
    )
    assert device_process.do("answer = released.is_set()")


def test_opening_and_closing_leaves_the_current_context_alone(device_process):
    device_process.do("DeviceContext(list_devices()[1]).make_current()")
    device_process.do(OWN + "segment.close()")
    assert device_process.do("answer = int(ok(d.cuCtxGetDevice()))") == 1
