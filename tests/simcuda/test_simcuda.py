"""The simulated driver keeps the real one's rules: each misuse is planted here, and seen to be caught."""

import pytest

pytest.importorskip("cuda.bindings")

BLOCK = 2 << 20
EXPORT = """
start()
pointer = ok(d.cuMemAlloc(4096))
fill(pointer, 1, 4096)
ok(d.cuCtxSynchronize())
answer = raw(ok(d.cuIpcGetMemHandle(pointer)))
"""
IMPORT = """
start()
handle = made(d.CUipcMemHandle, told)
pointer = ok(d.cuIpcOpenMemHandle(handle, 1))
answer = int(pointer)
"""


def test_nothing_works_before_it_is_initialized(worker):
    worker.refuses("NOT_INITIALIZED", "ok(d.cuDeviceGetCount())")
    worker.refuses("INVALID_CONTEXT", "ok(d.cuInit(0)); ok(d.cuMemAlloc(1))")


def test_the_host_cannot_read_device_memory(worker):
    worker.do("start(); pointer = ok(d.cuMemAlloc(100))")
    with pytest.raises(EOFError, match="-11"):
        worker.do("ctypes.string_at(int(pointer), 1)")


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        ("ok(d.cuMemFree(pointer)); read(pointer, 1)", "not allocated"),
        ("read(int(pointer) + 4090, 7)", "beyond the end"),
        ("read(12345, 1)", "not allocated"),
    ],
)
def test_a_wrong_address_ends_the_context(careless, worker, misuse, text):
    worker.do("start(); pointer = ok(d.cuMemAlloc(4096))")
    worker.refuses("ILLEGAL_ADDRESS", misuse)
    worker.refuses("ILLEGAL_ADDRESS", "ok(d.cuMemAlloc(1))")
    assert text in careless.violations()[0]


@pytest.mark.parametrize(
    "misuse",
    [
        "d.cuMemFree(12345)",
        "d.cuIpcCloseMemHandle(12345)",
        "d.cuMemHostUnregister(12345)",
        "d.cuMemFreeHost(12345)",
        "d.cuDevicePrimaryCtxRelease(1)",
        "s = ok(d.cuStreamCreate(0)); ok(d.cuStreamDestroy(s)); d.cuStreamQuery(s)",
        "e = ok(d.cuEventCreate(2)); ok(d.cuEventDestroy(e)); d.cuEventQuery(e)",
    ],
)
def test_missing_memory_cannot_be_used(careless, worker, misuse):
    worker.do("start()")
    worker.do(misuse)


def test_the_memory_of_a_process_that_is_gone_is_free_again(machine, one, two):
    machine.set_memory(5 * BLOCK)
    one.do("start(); ok(d.cuMemAlloc(told))", 3 * BLOCK)
    two.do("start(); ok(d.cuMemAlloc(1000))")
    one.kill()
    assert machine.used(0) == BLOCK
    two.do("ok(d.cuMemAlloc(told))", 4 * BLOCK)
    two.refuses("OUT_OF_MEMORY", "ok(d.cuMemAlloc(told))", BLOCK)


def test_with_its_last_retainer_a_context_goes_and_all_that_it_has(machine, one, two):
    handle = one.do(EXPORT)
    two.do(IMPORT, handle)
    two.do("ok(d.cuMemAlloc(100)); ok(d.cuDevicePrimaryCtxRetain(0))")
    two.do("ok(d.cuDevicePrimaryCtxRelease(0)); ok(d.cuMemAlloc(100))")
    assert machine.used(0) == 2 * BLOCK
    two.do("ok(d.cuIpcCloseMemHandle(pointer)); ok(d.cuDevicePrimaryCtxRelease(0))")
    assert machine.used(0) == BLOCK
    two.refuses("CONTEXT_IS_DESTROYED", "ok(d.cuMemAlloc(100))")
    # Made anew it is empty.
    two.do("start(); pointer = ok(d.cuIpcOpenMemHandle(handle, 1)); read(pointer, 1)")
    two.do("ok(d.cuIpcCloseMemHandle(pointer))")


# The first stream is held before it writes.
TWO_STREAMS = """
start()
a, b = ok(d.cuMemAlloc(64)), ok(d.cuMemAlloc(64))
fill(a, 0, 64); fill(b, 0, 64); ok(d.cuCtxSynchronize())
one, two = ok(d.cuStreamCreate(told)), ok(d.cuStreamCreate(told))
event = ok(d.cuEventCreate(2))
hold(one); fill(a, 5, 64, one)
ok(d.cuEventRecord(event, one))
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_shows_as_wrong_data(worker, waits):
    worker.do(TWO_STREAMS, 1)
    if waits:
        worker.do("ok(d.cuStreamWaitEvent(two, event, 0)); released.set()")
    seen = worker.do(
        "host = ok(d.cuMemHostAlloc(64, 0)); ok(d.cuMemcpyDtoDAsync(b, a, 64, two))\n"
        "ok(d.cuMemcpyDtoHAsync(host, b, 1, two)); ok(d.cuStreamSynchronize(two))\n"
        "answer = ctypes.string_at(host, 1)[0]"
    )
    assert seen == (5 if waits else 0)


@pytest.mark.parametrize("flags", [0, 1])
def test_the_legacy_stream_waits_for_blocking_streams_only(worker, flags):
    worker.do(TWO_STREAMS, flags)
    seen = worker.do(
        "host = ok(d.cuMemHostAlloc(64, 0)); ok(d.cuMemcpyDtoHAsync(host, a, 1, 0))\n"
        "if told: released.set()\n"
        "ok(d.cuStreamSynchronize(0)); answer = ctypes.string_at(host, 1)[0]",
        flags == 0,
    )
    assert seen == (5 if flags == 0 else 0)


def test_a_wait_means_what_was_recorded_before_it(worker):
    worker.do(TWO_STREAMS, 1)
    worker.do("early = ok(d.cuEventCreate(2)); ok(d.cuEventRecord(early, two))")
    worker.do("ok(d.cuStreamWaitEvent(two, early, 0)); ok(d.cuEventRecord(early, one))")
    worker.do("ok(d.cuStreamSynchronize(two))")
    # What was recorded behind the held stream since is no matter of the wait.
    codes = "answer = [int(d.cuStreamQuery(one)[0]), int(d.cuEventQuery(early)[0])]"
    assert worker.do(codes) == [600, 600]
    worker.do("released.set(); ok(d.cuStreamSynchronize(one))")
    assert worker.do(codes) == [0, 0]


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_memory_is_read_when_the_copy_runs(machine, worker, pinned):
    worker.do(TWO_STREAMS, 1)
    seen = worker.do(
        "pageable = ctypes.create_string_buffer(64)\n"
        "host = ok(d.cuMemHostAlloc(64, 0)) if told else ctypes.addressof(pageable)\n"
        "ctypes.memset(host, 7, 64); ok(d.cuMemcpyHtoDAsync(b, host, 64, one))\n"
        "ctypes.memset(host, 9, 64); released.set()\n"
        "ok(d.cuStreamSynchronize(one)); answer = read(b, 1)[0]",
        pinned,
    )
    assert seen == (9 if pinned else 7)
    assert machine.calls("cuMemcpyHtoDAsync")[0].arguments == (64, int(pinned))


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("ok(d.cuMemHostAlloc(64, 0)), 64", "HOST_MEMORY_ALREADY_REGISTERED"),
        ("at + 4096, 8192", "HOST_MEMORY_ALREADY_REGISTERED"),
        ("at - 4096, 16384", "HOST_MEMORY_ALREADY_REGISTERED"),
        ("at, 0", "INVALID_VALUE"),
        ("4096, 4096", "INVALID_VALUE"),
    ],
)
def test_pinned_or_missing_memory_cannot_be_pinned(worker, place, code):
    worker.do(
        "start(); import mmap; m = mmap.mmap(-1, 16384)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m)) + 4096\n"
        "ok(d.cuMemHostRegister(at, 8192, 1))"
    )
    worker.refuses(code, f"ok(d.cuMemHostRegister(*({place}), 1))")
    worker.do("ok(d.cuMemHostUnregister(at)); ok(d.cuMemHostRegister(at - 4096, 16384, 1))")


def test_an_event_is_recorded_on_streams_of_its_device_only(worker):
    worker.do("start(1); theirs = ok(d.cuStreamCreate(1)); start(0)")
    worker.do("event = ok(d.cuEventCreate(2)); stream = ok(d.cuStreamCreate(1))")
    worker.refuses("INVALID_HANDLE", "ok(d.cuEventRecord(event, theirs))")
    # Others may wait for it.
    worker.do("ok(d.cuEventRecord(event, stream)); ok(d.cuStreamWaitEvent(theirs, event, 0))")
    worker.do("ok(d.cuStreamSynchronize(theirs))")


def test_the_own_handle_and_that_of_another_device_are_refused(machine, one, two):
    handle = one.do(EXPORT)
    one.refuses("INVALID_CONTEXT", IMPORT, handle)
    two.refuses("INVALID_DEVICE", IMPORT.replace("start()", "start(1)"), handle)
    two.refuses("INVALID_VALUE", IMPORT, [1] * 64)
    machine.allow_peers()
    two.do(IMPORT.replace("start()", "start(1)"), handle)
    assert two.do("answer = ok(d.cuPointerGetAttribute(d.CUpointer_attribute(9), pointer))") == 0


@pytest.mark.parametrize("killed", [True, False])
def test_an_import_dies_with_what_it_imports(careless, one, two, killed):
    two.do(IMPORT, one.do(EXPORT))
    if killed:
        one.kill()
    else:
        one.do("ok(d.cuMemFree(pointer))")
    two.refuses("ILLEGAL_ADDRESS", "read(pointer, 1)")
    assert "whose exporter" in careless.violations()[0]


SHARE_EVENT = """
stream = ok(d.cuStreamCreate(1))
event = ok(d.cuEventCreate(2 | 4))
answer = raw(ok(d.cuIpcGetEventHandle(event)))
"""
OPEN_EVENT = """
event = ok(d.cuIpcOpenEventHandle(made(d.CUipcEventHandle, told)))
stream = ok(d.cuStreamCreate(1))
host = ok(d.cuMemHostAlloc(64, 0))
"""


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_orders_the_streams_of_two_processes(one, two, waits):
    two.do(IMPORT, one.do(EXPORT))
    two.do(OPEN_EVENT, one.do(SHARE_EVENT))
    one.do("hold(stream); fill(pointer, 6, 4096, stream); ok(d.cuEventRecord(event, stream))")
    if waits:
        two.do("ok(d.cuStreamWaitEvent(stream, event, 0))")
    two.do("ok(d.cuMemcpyDtoHAsync(host, pointer, 1, stream))")
    if waits:
        one.do("released.set()")
    two.do("ok(d.cuStreamSynchronize(stream))")
    assert two.do("answer = ctypes.string_at(host, 1)[0]") == (6 if waits else 1)


def test_the_event_of_a_process_that_was_killed_never_comes(one, two):
    one.do(EXPORT)
    two.do("start()")
    two.do(OPEN_EVENT, one.do(SHARE_EVENT))
    one.do("hold(stream); ok(d.cuEventRecord(event, stream))")
    one.kill()
    two.do("ok(d.cuStreamWaitEvent(stream, event, 0))")
    assert two.do("answer = int(d.cuEventQuery(event)[0])") == 600
    assert two.do("answer = int(d.cuStreamQuery(stream)[0])") == 600


def test_unknown_functions_are_not_found(worker):
    worker.refuses("not found", "start(); ok(d.cuMemAllocManaged(1, 1))")
