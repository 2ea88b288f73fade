"""Physical memory, mappings and descriptors of the simulated driver: each misuse is planted, and caught."""

import pytest

from tests.simcuda.processes import hand_over

pytest.importorskip("cuda.bindings")

BLOCK = 2 << 20
# What a process does to have memory mapped, in steps that tests leave out or do otherwise.
SETUP = f"""
BLOCK = {BLOCK}
FD = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

def properties(device=0, shared=True):
    made = d.CUmemAllocationProp()
    made.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    if shared:
        made.requestedHandleTypes = FD
    return made

def allow(pointer, nbytes, device=0):
    access = d.CUmemAccessDesc()
    access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(d.cuMemSetAccess(int(pointer), nbytes, [access], 1))

def mapped(handle, nbytes=BLOCK):
    pointer = int(ok(d.cuMemAddressReserve(nbytes, 0, 0, 0)))
    ok(d.cuMemMap(pointer, nbytes, 0, handle, 0))
    return pointer

start()
"""
MAPPED = SETUP + "handle = ok(d.cuMemCreate(BLOCK, properties(), 0)); pointer = mapped(handle)\n"
USABLE = MAPPED + "allow(pointer, BLOCK)\n"
FREE = "ok(d.cuMemUnmap(pointer, BLOCK)); ok(d.cuMemAddressFree(pointer, BLOCK))\n"


def test_mapped_memory_is_used_as_an_allocation(machine, worker):
    worker.do(USABLE)
    assert machine.used(0) == BLOCK
    worker.do("fill(pointer, 7, BLOCK); ok(d.cuMemRelease(handle))")
    assert worker.do("answer = read(pointer + BLOCK - 1, 1)[0]") == 7
    assert worker.do(
        "kinds = d.CUpointer_attribute\n"
        "answer = [ok(d.cuPointerGetAttribute(kinds(9), pointer)),\n"
        "          int(ok(d.cuPointerGetAttribute(kinds(1), pointer))),\n"
        "          int(ok(d.cuMemGetAddressRange(pointer + 5))[1])]"
    ) == [0, 0, BLOCK]
    worker.do(FREE)
    assert machine.used(0) == 0
    # The last of the context finds nothing left.
    worker.do("ok(d.cuDevicePrimaryCtxRelease(0))")


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        ("ok(d.cuMemUnmap(pointer, BLOCK)); read(pointer, 1)", "nothing is mapped"),
        (FREE + "read(pointer, 1)", "not allocated"),
        ("read(pointer + BLOCK - 1, 2)", "beyond the end of a mapping"),
        ("read(mapped(handle), 1)", "no access"),
        ("read(int(ok(d.cuMemAddressReserve(BLOCK, 0, 0, 0))), 1)", "nothing is mapped"),
        ("fill(pointer, 1, BLOCK + 1); ok(d.cuCtxSynchronize())", "beyond the end of a mapping"),
        (
            "start(1); fill(pointer, 1, BLOCK); ok(d.cuCtxSynchronize())",
            "no access",
        ),
    ],
)
def test_a_wrong_use_ends_the_context(careless, worker, misuse, text):
    worker.do(USABLE)
    worker.refuses("ILLEGAL_ADDRESS", misuse)
    worker.refuses("ILLEGAL_ADDRESS", "ok(d.cuMemAlloc(1))")
    assert text in careless.violations()[0]


def test_unmapping_does_not_wait_for_what_runs(careless, worker):
    worker.do(USABLE + "stream = ok(d.cuStreamCreate(1)); hold(stream)")
    worker.do("fill(pointer, 1, BLOCK, stream); ok(d.cuMemUnmap(pointer, BLOCK))")
    worker.refuses("ILLEGAL_ADDRESS", "released.set(); ok(d.cuStreamSynchronize(stream))")
    assert "nothing is mapped" in careless.violations()[0]


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        ("ok(d.cuMemAddressFree(pointer, BLOCK))", "in which memory is mapped"),
        ("ok(d.cuMemAddressFree(pointer, 2 * BLOCK))", "not reserved so"),
        ("ok(d.cuMemUnmap(pointer + BLOCK, BLOCK))", "not mapped so"),
        ("ok(d.cuMemUnmap(pointer, BLOCK)); ok(d.cuMemUnmap(pointer, BLOCK))", "not mapped so"),
        (FREE + "ok(d.cuMemAddressFree(pointer, BLOCK))", "not reserved so"),
        ("ok(d.cuMemRelease(handle)); ok(d.cuMemRelease(handle))", "no handle"),
        ("ok(d.cuMemMap(pointer, BLOCK, 0, handle, 0))", "where memory is mapped"),
        ("ok(d.cuMemMap(pointer + 4 * BLOCK, BLOCK, 0, handle, 0))", "not reserved"),
    ],
)
def test_unmapped_memory_cannot_be_unmapped(careless, worker, misuse, text):
    worker.do(USABLE)
    worker.refuses("INVALID_VALUE", misuse)
    assert text in careless.violations()[0]


@pytest.mark.parametrize(
    "misuse",
    [
        "ok(d.cuMemCreate(BLOCK + 4096, properties(), 0))",
        "ok(d.cuMemCreate(0, properties(), 0))",
        "ok(d.cuMemAddressReserve(4096, 0, 0, 0))",
        "mapped(handle, 2 * BLOCK)",
        "ok(d.cuMemMap(int(ok(d.cuMemAddressReserve(BLOCK, 0, 0, 0))), 4096, 0, handle, 0))",
        "allow(pointer, BLOCK // 2)",
        "allow(pointer + BLOCK, BLOCK)",
        "ok(d.cuMemImportFromShareableHandle(0, FD))",
        "ok(d.cuMemImportFromShareableHandle(987, FD))",
    ],
)
def test_wrong_sizes_and_descriptors_are_refused(worker, misuse):
    worker.do(USABLE)
    worker.refuses("INVALID_VALUE", misuse)


@pytest.mark.parametrize(
    ("left", "text"),
    [
        ("", "still mapped"),
        ("ok(d.cuMemUnmap(pointer, BLOCK))", "still reserved"),
        (FREE, "not released"),
    ],
)
def test_memory_left_by_the_last_context_is_noted(careless, worker, left, text):
    worker.do(USABLE + left)
    worker.do("ok(d.cuDevicePrimaryCtxRelease(0))")
    assert any(text in noted for noted in careless.violations())


def test_a_device_is_given_access_where_it_reaches_the_memory(machine, worker):
    worker.do(USABLE)
    worker.refuses("INVALID_DEVICE", "allow(pointer, BLOCK, 1)")
    machine.allow_peers()
    worker.do("allow(pointer, BLOCK, 1); start(1)")
    worker.do("fill(pointer, 3, BLOCK); answer = read(pointer, 1)[0]")
    assert machine.used(0) == BLOCK


IMPORT = (
    "handle = ok(d.cuMemImportFromShareableHandle(fd, FD)); os.close(fd)\n"
    "pointer = mapped(handle); ok(d.cuMemRelease(handle)); allow(pointer, BLOCK)\n"
)
EXPORT = "fd = int(ok(d.cuMemExportToShareableHandle(handle, FD, 0))); ok(d.cuMemRelease(handle))\n"


def share(one, two, path):
    """Have the second process map what the first has."""
    one.do(USABLE + EXPORT)
    hand_over(one, "fd", two, path)
    one.do("os.close(fd)")
    two.do(SETUP + IMPORT)


@pytest.mark.parametrize("killed", [True, False])
def test_memory_outlives_who_has_made_it(machine, one, two, tmp_path, killed):
    machine.set_memory(BLOCK)
    share(one, two, tmp_path / "socket")
    one.do("fill(pointer, 5, BLOCK); ok(d.cuCtxSynchronize())")
    if killed:
        one.kill()
    else:
        one.do(FREE)
    assert machine.used(0) == BLOCK
    assert two.do("answer = read(pointer, 1)[0]") == 5
    two.refuses("OUT_OF_MEMORY", "ok(d.cuMemAlloc(1))")
    two.do(FREE)
    assert machine.used(0) == 0
    two.do("ok(d.cuMemAlloc(1))")


def test_a_descriptor_alone_keeps_memory(machine, worker):
    machine.set_memory(BLOCK)
    worker.do(USABLE + "fd = int(ok(d.cuMemExportToShareableHandle(handle, FD, 0)))")
    worker.do(FREE + "ok(d.cuMemRelease(handle))")
    assert machine.used(0) == BLOCK
    worker.do("os.close(fd)")
    assert machine.used(0) == 0
    worker.do("ok(d.cuMemAlloc(BLOCK))")


def test_a_machine_may_do_without_descriptors(machine, worker):
    machine.refuse_memory_fds()
    worker.do(SETUP)
    worker.refuses("NOT_SUPPORTED", "ok(d.cuMemCreate(BLOCK, properties(), 0))")
    assert worker.do(
        "answer = [ok(d.cuDeviceGetAttribute(d.CUdevice_attribute(n), 0)) for n in (102, 103)]"
    ) == [1, 0]
    worker.do("ok(d.cuMemRelease(ok(d.cuMemCreate(BLOCK, properties(0, False), 0))))")


def test_a_machine_may_refuse_handles(machine, one, two):
    machine.refuse_legacy_handles()
    handle = one.do("start(); answer = raw(ok(d.cuIpcGetMemHandle(ok(d.cuMemAlloc(1)))))")
    two.do("start()")
    two.refuses(
        "NOT_SUPPORTED", "ok(d.cuIpcOpenMemHandle(made(d.CUipcMemHandle, told), 1))", handle
    )
