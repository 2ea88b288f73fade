"""Contexts of the simulated driver: which there are, what belongs to each, and what a fork leaves of it."""

import pytest

from tests.simcuda.machine import running_machine
from tests.simcuda.processes import running_worker

pytest.importorskip("cuda.bindings")

# What a child does that a process forks; the parent gives what it has seen.
FORK = """
def in_child(look):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(look()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(os.read(reading, 4096))
"""
NOT_INITIALIZED = 3
BLOCK = 2 << 20


def test_contexts_are_counted_while_they_are_there(machine, one, two):
    one.do("ok(d.cuInit(0)); ok(d.cuDeviceGetCount())")
    assert machine.contexts() == []
    one.do("start(0); start(0); start(1)")
    two.do("start(0); other = ok(d.cuCtxCreate(None, 0, 0))")
    assert machine.contexts() == sorted([one.pid, one.pid, two.pid, two.pid])
    assert machine.contexts(1) == [one.pid]
    one.do("ok(d.cuDevicePrimaryCtxRelease(0))")
    two.do("ok(d.cuCtxDestroy(other))")
    assert machine.contexts(0) == sorted([one.pid, two.pid])
    one.do("ok(d.cuDevicePrimaryCtxRelease(0))")
    two.kill()
    assert machine.contexts(0) == []
    assert machine.used(0) == 0


def test_nothing_works_in_a_child_that_is_forked_after_cuinit(worker):
    worker.do(FORK + "start(); pointer = ok(d.cuMemAlloc(64)); host = bytes(64)")
    seen = worker.do(
        "answer = in_child(lambda: [int(call()[0]) for call in (\n"
        "    lambda: d.cuInit(0), d.cuDeviceGetCount, d.cuCtxGetCurrent,\n"
        "    lambda: d.cuDevicePrimaryCtxRetain(0), lambda: d.cuMemAlloc(1),\n"
        "    lambda: d.cuStreamCreate(1), lambda: d.cuMemcpyHtoD(pointer, host, 64),\n"
        "    lambda: d.cuMemcpyHtoDAsync(pointer, host, 64, 0), d.cuCtxSynchronize,\n"
        ")])"
    )
    assert seen == [NOT_INITIALIZED] * 9
    # The parent goes on.
    worker.do("read(pointer, 1)")


def test_a_child_that_is_forked_before_cuinit_is_a_process_as_any(worker):
    worker.do(FORK)
    assert worker.do("answer = in_child(lambda: [start(), len(ok(d.cuMemGetInfo()))])") == [
        None,
        2,
    ]
    worker.do("start()")


# A context of its own, current, beside the primary one; each with a stream, an event and memory.
TWO_CONTEXTS = """
start()
primary = ok(d.cuCtxGetCurrent())
stream, event, memory = ok(d.cuStreamCreate(1)), ok(d.cuEventCreate(2)), ok(d.cuMemAlloc(64))
other = ok(d.cuCtxCreate(None, 0, 0))
theirs, sign, place = ok(d.cuStreamCreate(1)), ok(d.cuEventCreate(2)), ok(d.cuMemAlloc(64))
"""


def test_a_context_of_its_own_is_current_until_it_is_destroyed(machine, worker):
    worker.do(TWO_CONTEXTS)
    assert machine.used(0) == 2 * BLOCK
    worker.do("assert ok(d.cuCtxGetCurrent()) == other; assert int(ok(d.cuCtxGetDevice())) == 0")
    worker.do("fill(place, 1, 64, theirs); ok(d.cuEventRecord(sign, theirs))")
    worker.do("ok(d.cuCtxDestroy(other)); assert ok(d.cuCtxGetCurrent()) == primary")
    assert machine.used(0) == BLOCK
    worker.do("fill(memory, 1, 64, stream); ok(d.cuStreamSynchronize(stream))")


@pytest.mark.parametrize(
    ("misuse", "code", "text"),
    [
        ("fill(place, 1, 64, stream)", "INVALID_HANDLE", "a stream of another context"),
        ("hold(stream)", "INVALID_HANDLE", "a stream of another context"),
        (
            "ok(d.cuMemcpyDtoDAsync(place, place, 64, stream))",
            "INVALID_HANDLE",
            "a stream of another context",
        ),
        ("ok(d.cuEventRecord(sign, stream))", "INVALID_HANDLE", ""),
        ("ok(d.cuEventRecord(event, theirs))", "INVALID_HANDLE", ""),
        (
            "fill(memory, 1, 64, theirs); ok(d.cuStreamSynchronize(theirs))",
            "ILLEGAL_ADDRESS",
            "memory of another context",
        ),
        ("ok(d.cuCtxDestroy(primary))", "INVALID_CONTEXT", "primary"),
        ("ok(d.cuCtxDestroy(other)); ok(d.cuCtxDestroy(other))", "INVALID_CONTEXT", "cuCtxDestroy"),
        ("ok(d.cuCtxDestroy(other)); ok(d.cuStreamQuery(theirs))", "INVALID_HANDLE", "a stream"),
        ("ok(d.cuCtxDestroy(other)); ok(d.cuEventQuery(sign))", "INVALID_HANDLE", "an event"),
        ("ok(d.cuCtxDestroy(other)); read(place, 1)", "ILLEGAL_ADDRESS", "not allocated"),
        (
            "ok(d.cuCtxDestroy(other)); ok(d.cuCtxSetCurrent(other)); ok(d.cuMemAlloc(1))",
            "CONTEXT_IS_DESTROYED",
            "",
        ),
    ],
)
def test_objects_of_another_context_are_refused(misuse, code, text):
    with running_machine() as machine, running_worker(machine) as worker:
        worker.do(TWO_CONTEXTS)
        worker.refuses(code, misuse)
        assert text in "".join(machine.violations())


def test_copies_and_waits_cross_contexts(worker):
    worker.do(TWO_CONTEXTS)
    worker.do("fill(place, 7, 64, theirs); ok(d.cuEventRecord(sign, theirs))")
    worker.do("ok(d.cuStreamWaitEvent(stream, sign, 0)); ok(d.cuCtxSetCurrent(primary))")
    worker.do("ok(d.cuMemcpyDtoDAsync(memory, place, 64, stream))")
    worker.do("ok(d.cuStreamSynchronize(stream)); answer = 0")
    assert worker.do("answer = read(memory, 1)[0]") == 7


def test_one_context_of_a_device_opens_memory_of_another_process(one, two):
    raw = one.do("start(); answer = raw(ok(d.cuIpcGetMemHandle(ok(d.cuMemAlloc(64)))))")
    two.do(TWO_CONTEXTS + "handle = made(d.CUipcMemHandle, told)", raw)
    two.do("ok(d.cuIpcOpenMemHandle(handle, 1)); ok(d.cuCtxSetCurrent(primary))")
    two.refuses("INVALID_CONTEXT", "ok(d.cuIpcOpenMemHandle(handle, 1))")


def test_with_the_primary_context_its_streams_and_events_go(careless, worker):
    worker.do("start(); stream, event = ok(d.cuStreamCreate(1)), ok(d.cuEventCreate(2))")
    worker.do("ok(d.cuDevicePrimaryCtxRelease(0)); start()")
    for use in ("d.cuStreamQuery(stream)", "d.cuEventQuery(event)"):
        worker.refuses("INVALID_HANDLE", f"ok({use})")


def test_peer_access_is_given_once(machine, worker):
    machine.allow_peers()
    worker.do("start(1); peer = ok(d.cuCtxGetCurrent()); theirs = ok(d.cuMemAlloc(64)); start()")
    worker.refuses("PEER_ACCESS_NOT_ENABLED", "ok(d.cuCtxDisablePeerAccess(peer))")
    worker.do("ok(d.cuCtxEnablePeerAccess(peer, 0)); fill(theirs, 1, 64); read(theirs, 1)")
    worker.refuses("PEER_ACCESS_ALREADY_ENABLED", "ok(d.cuCtxEnablePeerAccess(peer, 0))")
    worker.do("ok(d.cuCtxDisablePeerAccess(peer)); ok(d.cuCtxEnablePeerAccess(peer, 0))")


def test_kernels_need_peer_access_and_copies_do_not(careless, worker):
    careless.allow_peers()
    worker.do("start(1); theirs = ok(d.cuMemAlloc(64)); start(); read(theirs, 1)")
    worker.refuses("ILLEGAL_ADDRESS", "fill(theirs, 1, 64); ok(d.cuCtxSynchronize())")
    assert "another context" in careless.violations()[0]


def test_each_thread_has_a_default_stream_of_its_own(worker):
    worker.do("start(); host = ok(d.cuMemHostAlloc(64, 0)); context = ok(d.cuCtxGetCurrent())")
    worker.do("hold(2)")
    # Another thread's is another stream, which does not wait for this one; the legacy one does.
    assert worker.do(
        "seen = []\n"
        "def look():\n"
        "    ok(d.cuCtxSetCurrent(context)); ok(d.cuStreamSynchronize(2))\n"
        "    seen.extend(int(d.cuStreamQuery(stream)[0]) for stream in (2, 0))\n"
        "thread = threading.Thread(target=look); thread.start(); thread.join()\n"
        "ok(d.cuMemcpyDtoDAsync(ok(d.cuMemAlloc(64)), ok(d.cuMemAlloc(64)), 64, 0))\n"
        "answer = [*seen, int(d.cuStreamQuery(2)[0]), int(d.cuStreamQuery(0)[0])]"
    ) == [0, 0, 600, 600]
    worker.do("released.set(); ok(d.cuStreamSynchronize(0))")


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_cannot_be_destroyed(careless, worker, stream):
    worker.do("start()")
    worker.refuses("INVALID_HANDLE", f"ok(d.cuStreamDestroy({stream}))")


def test_a_destroyed_stream_does_what_it_has_still_to_do(worker):
    worker.do("start(); a = ok(d.cuMemAlloc(64)); fill(a, 0, 64); ok(d.cuCtxSynchronize())")
    worker.do("stream = ok(d.cuStreamCreate(1)); hold(stream); fill(a, 5, 64, stream)")
    worker.do("ok(d.cuStreamDestroy(stream)); host = ok(d.cuMemHostAlloc(64, 0))")
    worker.do("ok(d.cuMemcpyDtoHAsync(host, a, 1, ok(d.cuStreamCreate(1))))")
    worker.do("released.set(); ok(d.cuCtxSynchronize())")
    assert worker.do("answer = read(a, 1)[0]") == 5
