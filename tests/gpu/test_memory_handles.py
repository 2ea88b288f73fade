"""Both ways in which the server's memory crosses processes: legacy handles, and file descriptors of it."""

import functools

import numpy as np
import pytest

from gpubridge.cuda_ipc import probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from tests.gpu.lane import LIBRARIES, SIMULATED, needs_library, running_lane_server
from tests.gpu.models import write_lab, write_member
from tests.simcuda.processes import hand_over
from tests.unit.cuda_workers import device_worker

COUNT = 50_000
NBYTES = 4 * COUNT
SIZE = 3 << 20

OWNER = f"""
segment = DeviceSegment.allocate(context, 1, {SIZE}, by_fd=told[0])
put(segment.pointer + segment.size - 64, bytes(told[1]))
answer = [list(segment.handle), segment.size]
"""
OPEN = "segment = DeviceSegment.open(context, 1, bytes(told[0]), told[1])"
OPEN_FD = "segment = DeviceSegment.open_fd(context, 1, fd, told[1]); os.close(fd)"
LAST = "answer = seen(segment.pointer + segment.size - 64, 64)"
FIRST = "answer = seen(segment.pointer, 64)"


@functools.cache
def crosses(handles):
    """Say why memory does not cross so on this machine, if it does not."""
    if SIMULATED:
        return ""
    check = check_device(probe_devices().devices[0].uuid)
    return {"legacy": check.memory, "fd": check.memory_fds}[handles].reason


@pytest.fixture(scope="module", params=["legacy", "fd"])
def handles(request):
    if crosses(request.param):
        pytest.skip(crosses(request.param))
    return request.param


@pytest.fixture
def shared(machine, handles, tmp_path, rng):
    """Two processes that have memory of the first, and what it has written at its end."""
    data = list(rng.bytes(64))
    with device_worker(machine) as owner, device_worker(machine) as other:
        told = owner.do(OWNER, [handles == "fd", data])
        if handles == "fd":
            hand_over(owner, "segment.fds[0]", other, tmp_path / "socket")
        other.do(OPEN_FD if handles == "fd" else OPEN, told)
        yield owner, other, data


def test_each_process_reads_what_the_other_has_written(shared, rng):
    owner, other, data = shared
    assert other.do(LAST) == data
    fresh = list(rng.bytes(64))
    other.do("put(segment.pointer, bytes(told))", fresh)
    assert owner.do(FIRST) == fresh
    other.do("segment.close(); segment.close(); context.close()")
    assert owner.do(LAST) == data
    owner.do("segment.close(); segment.close(); context.close()")


@pytest.mark.parametrize("killed", [False, True])
def test_memory_shared_by_descriptor_outlives_its_maker(shared, handles, killed):
    if handles == "legacy":
        pytest.skip("memory of a handle is its owner's: nobody may look at it any more")
    owner, other, data = shared
    if killed:
        owner.kill()
    else:
        owner.do("segment.close()")
    assert other.do(LAST) == data
    other.do("segment.close()")


@pytest.mark.last
def test_memory_comes_back_when_nobody_has_it(machine, handles):
    with device_worker(machine) as worker:
        free = "with context.pushed(): answer = int(ok(d.cuMemGetInfo())[0])"
        # What the driver takes for itself at the first time stays.
        once = (
            "segment = DeviceSegment.allocate(context, 1, 64 << 20, by_fd=told); segment.close()\n"
        )
        worker.do(once, handles == "fd")
        before = worker.do(free)
        for _ in range(8):
            worker.do(once, handles == "fd")
        # Not one of the eight may stay.
        assert worker.do(free) > before - (64 << 20)


@pytest.fixture(scope="module", params=LIBRARIES)
def served(request, machine, handles, tmp_path_factory):
    needs_library(request.param)
    repository = tmp_path_factory.mktemp("models")
    write_lab(repository, request.param)
    write_member(repository, request.param, "member")
    flag = f"--backend-config=python,device-memory-handles={handles}"
    with running_lane_server(machine, repository, flag) as served:
        served.library = request.param
        yield served


def test_models_do_the_same_with_either(served, handles, rng):
    for does in ("double", "kept", "final"):
        values = rng.random(COUNT, np.float32)
        with served.costing("lab", h2d=(NBYTES, 1), d2h=(NBYTES, 1), waits=(1, 1)):
            answer = served.infer("lab", values, parameters={"do": does})
        assert answer == (200, (2 * values).tolist())
    values = rng.random(COUNT, np.float32)
    answer = served.infer("lab", values, parameters={"do": "call", "member": "member"})
    assert answer == (200, (4 * values).tolist())
    page = served.server.metrics()
    arenas = {name: n for name, n in page.items() if name.startswith("gpubridge_device_arenas")}
    ((name, count),) = arenas.items()
    assert f'handles="{handles}"' in name
    assert count == 2
    assert not [name for name in page if "device_not_shared" in name]


def test_libraries_allocate_in_it(served, rng):
    if served.library == "driver":
        pytest.skip("device_arena() is for libraries that allocate")
    for _ in range(3):
        values = rng.random(COUNT, np.float32)
        answer = served.infer("lab", values, parameters={"do": "born"})
        assert answer == (200, (2 * values).tolist())
