"""Stream capture of the simulated driver: what becomes of a graph, and which calls spoil one."""

import pytest

pytest.importorskip("cuda.bindings")

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NONE, ACTIVE, INVALIDATED = range(3)
SUCCESS, IMPLICIT, CAPTURED_EVENT = 0, 906, 907
UNSUPPORTED, INVALIDATED_ERROR = 900, 901

# A stream that is captured in mode `told`, another one, and what a test may use meanwhile.
SETUP = """
MODES = d.CUstreamCaptureMode
start()
context = ok(d.cuCtxGetCurrent())
a, b = ok(d.cuMemAlloc(64)), ok(d.cuMemAlloc(64))
fill(a, 1, 64); fill(b, 2, 64); ok(d.cuCtxSynchronize())
stream, other = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1))
event, sign = ok(d.cuEventCreate(2)), ok(d.cuEventCreate(2))
ok(d.cuEventRecord(sign, other)); ok(d.cuStreamSynchronize(other))
pinned, pageable = ok(d.cuMemHostAlloc(64, 0)), bytearray(64)
import mmap
page = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(page))

def begin(stream, mode):
    ok(d.cuStreamBeginCapture(stream, MODES(mode)))

def status(stream):
    return int(ok(d.cuStreamIsCapturing(stream)))

def end(stream):
    code, graph = d.cuStreamEndCapture(stream)
    return int(code)

def exchange(mode):
    return int(ok(d.cuThreadExchangeStreamCaptureMode(MODES(mode))))

def elsewhere(look, mode=0):
    # What another thread, in a mode, has from a call.
    seen = []
    def work():
        ok(d.cuCtxSetCurrent(context)); exchange(mode)
        seen.append(int(look()[0]))
    thread = threading.Thread(target=work); thread.start(); thread.join()
    return seen[0]
"""
CAPTURING = SETUP + "begin(stream, told)\n"


def test_a_graph_does_later_what_was_captured(worker):
    worker.do(CAPTURING, GLOBAL)
    assert worker.do("answer = status(stream), status(other)") == [ACTIVE, NONE]
    worker.do("ok(d.cuMemcpyDtoDAsync(b, a, 64, stream)); fill(a, 5, 64, stream)")
    worker.do("graph = ok(d.cuStreamEndCapture(stream))")
    assert worker.do("answer = read(a, 1)[0], read(b, 1)[0], status(stream)") == [1, 2, NONE]
    worker.do("exec = ok(d.cuGraphInstantiate(graph, 0)); ok(d.cuGraphDestroy(graph))")
    worker.do("ok(d.cuGraphLaunch(exec, other)); ok(d.cuStreamSynchronize(other))")
    assert worker.do("answer = read(a, 1)[0], read(b, 1)[0]") == [5, 1]
    worker.do("ok(d.cuGraphLaunch(exec, other)); ok(d.cuStreamSynchronize(other))")
    assert worker.do("ok(d.cuGraphExecDestroy(exec)); answer = read(b, 1)[0]") == 5


def test_work_on_other_streams_goes_on(worker):
    worker.do(CAPTURING, GLOBAL)
    worker.do("ok(d.cuMemcpyDtoHAsync(pinned, a, 1, other)); ok(d.cuEventRecord(sign, other))")
    worker.do("third = ok(d.cuStreamCreate(1)); ok(d.cuStreamWaitEvent(third, sign, 0))")
    worker.do("exchange(2); ok(d.cuStreamSynchronize(other)); ok(d.cuEventSynchronize(sign))")
    assert worker.do("answer = ctypes.string_at(pinned, 1)[0], end(stream)") == [1, SUCCESS]


UNSAFE = [
    "d.cuMemAlloc(64)",
    "d.cuMemFree(b)",
    "d.cuMemHostAlloc(64, 0)",
    "d.cuMemHostRegister(at, 4096, 1)",
    "d.cuEventQuery(sign)",
    "d.cuEventSynchronize(sign)",
    "d.cuStreamQuery(other)",
    "d.cuStreamSynchronize(other)",
    "d.cuMemcpyDtoH(pageable, a, 64)",
    "d.cuMemcpyHtoDAsync(a, bytes(64), 64, other)",
    "d.cuMemcpyDtoHAsync(pageable, a, 64, other)",
]


@pytest.mark.parametrize("call", UNSAFE)
def test_an_unsafe_call_of_any_thread_spoils_a_global_capture(worker, call):
    worker.do(CAPTURING, GLOBAL)
    assert worker.do(f"answer = elsewhere(lambda: {call})") == UNSUPPORTED
    assert worker.do("answer = status(stream)") == INVALIDATED
    assert worker.do("answer = int(d.cuMemsetD8Async(a, 1, 64, stream)[0]), end(stream)") == [
        INVALIDATED_ERROR,
        INVALIDATED_ERROR,
    ]
    # The stream is as it was, and so is the call.
    worker.do("fill(a, 9, 64, stream); ok(d.cuStreamSynchronize(stream))")
    assert worker.do(f"answer = elsewhere(lambda: {call})") == SUCCESS


@pytest.mark.parametrize(
    ("capture", "own", "thread", "seen"),
    [
        (GLOBAL, False, GLOBAL, UNSUPPORTED),
        (GLOBAL, False, THREAD_LOCAL, SUCCESS),
        (GLOBAL, False, RELAXED, SUCCESS),
        (THREAD_LOCAL, False, GLOBAL, SUCCESS),
        (RELAXED, False, GLOBAL, SUCCESS),
        (GLOBAL, True, GLOBAL, UNSUPPORTED),
        (GLOBAL, True, THREAD_LOCAL, UNSUPPORTED),
        (GLOBAL, True, RELAXED, SUCCESS),
        (THREAD_LOCAL, True, GLOBAL, UNSUPPORTED),
        (RELAXED, True, GLOBAL, SUCCESS),
    ],
)
def test_the_modes_of_thread_and_capture_decide(worker, capture, own, thread, seen):
    worker.do(CAPTURING, capture)
    call = "d.cuMemAlloc(64)"
    look = (
        f"exchange({thread}); answer = int({call}[0])"
        if own
        else f"answer = elsewhere(lambda: {call}, {thread})"
    )
    assert worker.do(look) == seen
    assert worker.do("answer = status(stream)") == (INVALIDATED if seen else ACTIVE)


def test_the_mode_of_a_thread_is_exchanged(worker):
    worker.do(SETUP)
    assert worker.do("answer = [exchange(2), exchange(1), exchange(0)]") == [0, 2, 1]


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("d.cuStreamSynchronize(stream)", UNSUPPORTED),
        ("d.cuStreamQuery(stream)", UNSUPPORTED),
        ("d.cuCtxSynchronize()", UNSUPPORTED),
        ("d.cuMemcpyHtoDAsync(a, bytes(64), 64, stream)", UNSUPPORTED),
        ("d.cuEventQuery(event)", CAPTURED_EVENT),
        ("d.cuEventSynchronize(event)", CAPTURED_EVENT),
    ],
)
def test_queries_of_a_captured_stream_spoil_it_in_every_mode(worker, mode, call, code):
    worker.do(CAPTURING + "ok(d.cuEventRecord(event, stream))", mode)
    assert worker.do(f"answer = elsewhere(lambda: {call}, 2)") == code
    assert worker.do("answer = status(stream), end(stream)") == [INVALIDATED, INVALIDATED_ERROR]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("call", ["d.cuMemsetD8Async(b, 1, 64, 0)", "d.cuStreamQuery(0)"])
def test_the_legacy_stream_spoils_captures_of_blocking_streams(worker, blocking, call):
    worker.do(SETUP + f"stream = ok(d.cuStreamCreate({0 if blocking else 1})); begin(stream, 1)")
    assert worker.do(f"answer = elsewhere(lambda: {call}, 2)") == (IMPLICIT if blocking else 0)
    assert worker.do("answer = status(stream)") == (INVALIDATED if blocking else ACTIVE)


def test_to_ask_whether_the_legacy_stream_is_captured_spoils_nothing(worker):
    worker.do(SETUP + "stream = ok(d.cuStreamCreate(0)); begin(stream, 1)")
    assert worker.do("answer = int(d.cuStreamIsCapturing(0)[0]), end(stream)") == [
        IMPLICIT,
        SUCCESS,
    ]
    assert worker.do("answer = status(0)") == NONE


FORK = (
    "fill(a, 6, 64, stream); ok(d.cuEventRecord(event, stream))\n"
    "ok(d.cuStreamWaitEvent(other, event, 0)); ok(d.cuMemcpyDtoDAsync(b, a, 64, other))\n"
)
DRAWN = "\nanswer = int(d.cuStreamWaitEvent(other, event, 0)[0])"
JOIN = "ok(d.cuEventRecord(sign, other)); ok(d.cuStreamWaitEvent(stream, sign, 0))\n"


def test_an_event_draws_another_stream_in(worker):
    worker.do(CAPTURING + FORK, GLOBAL)
    assert worker.do("answer = status(other)") == ACTIVE
    worker.do(JOIN + "graph = ok(d.cuStreamEndCapture(stream))")
    assert worker.do("answer = read(b, 1)[0], status(other)") == [2, NONE]
    worker.do("ok(d.cuGraphLaunch(ok(d.cuGraphInstantiate(graph, 0)), stream))")
    assert worker.do("ok(d.cuStreamSynchronize(stream)); answer = read(b, 1)[0]") == 6


@pytest.mark.parametrize(
    ("misuse", "code"),
    [
        (FORK + "answer = end(stream)", 904),
        (FORK + "answer = end(other)", 903),
        ("answer = elsewhere(lambda: d.cuStreamEndCapture(stream))", 908),
        ("answer = int(d.cuStreamWaitEvent(stream, sign, 0)[0])", 905),
        (
            "ok(d.cuEventRecord(event, stream)); end(stream)" + DRAWN,
            905,
        ),
        (
            "ok(d.cuEventRecord(event, stream)); begin(other, 0)" + DRAWN,
            902,
        ),
        ("answer = int(d.cuStreamBeginCapture(stream, MODES(0))[0])", 401),
        ("answer = int(d.cuStreamBeginCapture(0, MODES(0))[0])", 900),
        ("answer = end(other)", 401),
    ],
)
def test_captures_that_are_begun_or_ended_wrongly(worker, misuse, code):
    worker.do(CAPTURING, GLOBAL)
    assert worker.do(misuse) == code


def test_a_stream_that_is_destroyed_takes_its_capture_along(worker):
    worker.do(CAPTURING + "ok(d.cuStreamDestroy(stream)); ok(d.cuMemAlloc(64))", GLOBAL)
