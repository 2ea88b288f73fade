"""What a client makes the server keep is charged, bounded and timed, and is gone at its end.

Each kind of request is broken off at each stage, in each way in which requests end. Then nothing of it
is left: no object, no charge, no memory.
"""

import asyncio
import gc
import gzip
import os
import random
import threading
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpubridge import _native
from gpubridge.dataplane import GrowingMemory
from gpubridge.errors import BridgeError, ErrorCode
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw, typed
from tests.unit.http_endpoint import Endpoint, chunked, post
from tests.unit.test_http_inference import Server, infer

KIB, MIB = 1 << 10, 1 << 20
DATA, HEADERS, RST_STREAM, CONTINUATION = 0, 1, 3, 9
UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED = 14, 8, 4
VALUES = 150_000
NOISE = random.Random(1).randbytes(4 * VALUES)
CODED = ("grpc-encoding", "gzip")
STAGES = (1, 3, 5, 105, 60 * KIB, 70 * KIB, 300 * KIB, -1, None)


def large(model="m", count=VALUES):
    request = raw(("A", "FP32", [count], NOISE[: 4 * count]), id="large")
    request.model_name = model
    return request.SerializeToString()


def long_form():
    request = typed("FP32", "fp32_contents", [1.5] * VALUES)
    request.inputs[0].name = "A"
    return request.SerializeToString()


# The method, fields of the head, and the message.
KINDS = {
    "small": ("ModelInfer", (), message(large(count=10_000))),
    "long": ("ModelInfer", (), message(large())),
    "long form": ("ModelInfer", (), message(long_form())),
    "no model's": ("ModelInfer", (), message(large("missing"))),
    "compressed": ("ModelInfer", (CODED,), message(gzip.compress(large(), 1), flag=1)),
    "stream": ("ModelStreamInfer", (), message(large())),
    "compressed stream": ("ModelStreamInfer", (CODED,), message(gzip.compress(large(), 1), flag=1)),
    "small control": ("ModelConfig", (), message(NOISE[:50_000])),
    "control": ("ModelConfig", (), message(NOISE)),
    "compressed control": ("ModelConfig", (CODED,), message(gzip.compress(NOISE, 1), flag=1)),
}


def resets(endpoint):
    endpoint.receive(frame(RST_STREAM, 0, 1, (8).to_bytes(4, "big")))


def hangs_up(endpoint):
    endpoint.end()


def leaves(endpoint):
    endpoint.lose()


def is_slow(endpoint):
    for seconds in (0, 61, 122):
        endpoint.connection.check(seconds)


def is_refused(endpoint):
    for body in list(endpoint.regions.budget.arriving):
        body.refuse(BridgeError("full", ErrorCode.UNAVAILABLE))


def breaks_a_rule(endpoint):
    endpoint.receive(frame(DATA, 0, 0, b"x"))


def meets_a_stop(endpoint):
    endpoint.connection.finish()


def is_late(endpoint):
    for call in list(endpoint.connection.calls.values()):
        call._deadline_passed()


ENDS = (resets, hangs_up, leaves, is_slow, is_refused, breaks_a_rule, meets_a_stop, is_late)


def sent(kind, end, cut):
    method, fields, data = KINDS[kind]
    if end is is_late:
        fields = (*fields, ("grpc-timeout", "1H"))
    part = data[:cut]
    parts = [part[at : at + 16 * KIB] for at in range(0, len(part), 16 * KIB)]
    frames = [frame(DATA, 0, 1, each) for each in parts]
    return head(1, method, *fields) + b"".join(frames)


def objects():
    """Count what there is of ours by its type."""
    gc.collect()
    return Counter(
        type(each).__qualname__
        for each in gc.get_objects()
        if str(type(each).__module__).startswith("gpubridge")
    )


async def until(condition, endpoint):
    """Wait for workers."""
    while not condition():
        await endpoint.settle()
        await asyncio.to_thread(os.sched_yield)


def finish_work(workers):
    """Wait until no worker has anything to do: it may still look at what is given up."""
    together = threading.Barrier(2)
    for each in [workers._pool.submit(together.wait) for _ in range(2)]:
        each.result()


async def break_off(kind, end, cut):
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE + sent(kind, end, cut))
    end(endpoint)
    # What is whole may be answered; the rest is not kept by a connection that stays.
    if cut is not None:
        assert not endpoint.connection.account.held
    await until(lambda: not endpoint.connection.account.held, endpoint)
    if end is not leaves:
        endpoint.lose()
    assert endpoint.connection.account.held == 0
    assert endpoint.connection.http2.kept < 64 * KIB
    await until(lambda: endpoint.regions.lent() == (0, 0), endpoint)
    assert not endpoint.regions.budget.arriving
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0
    finish_work(endpoint.coder._workers)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_a_call_that_is_broken_off(kind, end):
    async def at_every_stage():
        for cut in STAGES:
            await break_off(kind, end, cut)

    asyncio.run(break_off(kind, end, -1))
    before = objects()
    asyncio.run(at_every_stage())
    assert objects() == before


def pages(column):
    """Return bytes of this process: 0 for those that have addresses, 1 for those in memory."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGESIZE")


def resident():
    return pages(1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_is_left_of_calls_that_are_broken_off(kind):
    async def reset_when_checked():
        endpoint = GrpcEndpoint(deferred=True)
        endpoint.receive(PREFACE)
        for number in range(30):
            endpoint.receive(sent(kind, resets, -1))
            # From here on Python has it.
            endpoint.connection.check(0)
            if number == 5:
                known = resident()
            resets(endpoint)
            endpoint.lose()
            endpoint = GrpcEndpoint(deferred=True, beside=endpoint)
            endpoint.receive(PREFACE)
        endpoint.lose()
        endpoint.regions.close()
        return resident() - known

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(reset_when_checked()) < 4 * MIB
    finally:
        gc.enable()


@pytest.fixture
@asynccontextmanager
async def endpoint():
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE)
    yield endpoint
    endpoint.lose()
    assert endpoint.connection.account.held == 0
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "small" not in kind])
async def test_a_large_message_is_charged_as_it_arrives(endpoint, kind):
    for cut in (70 * KIB, 200 * KIB, -1):
        other = GrpcEndpoint(beside=endpoint)
        other.receive(PREFACE + sent(kind, resets, cut))
        held = other.connection.account.held
        arrived = cut if cut > 0 else len(KINDS[kind][2])
        assert arrived - 8 * KIB <= held <= max(4 * arrived, 512 * KIB)
        assert endpoint.regions.budget.used >= held
        other.lose()
        assert other.connection.account.held == 0


async def test_many_small_messages_are_charged_together_and_refused_without_memory(endpoint):
    part = message(bytes(60_000))[:-1]
    for stream_id in range(1, 201, 2):
        endpoint.receive(head(stream_id, "ModelConfig"))
        for at in range(0, len(part), 16 * KIB):
            endpoint.receive(frame(DATA, 0, stream_id, part[at : at + 16 * KIB]))
    held = endpoint.connection.account.held
    kept = endpoint.connection.http2.kept
    assert abs(held - kept) <= 512 * KIB
    assert held > 5 * MIB
    other = GrpcEndpoint(beside=endpoint)
    other.receive(PREFACE + head(1, "ModelConfig"))
    whole = KINDS["control"][2]
    for _ in range(4):
        other.receive(frame(DATA, 0, 1, whole[: 16 * KIB]))
        whole = whole[16 * KIB :]
    # Others find memory, since this connection holds more than its share.
    rest = [GrpcEndpoint(beside=endpoint) for _ in range(5)]
    for each in rest:
        each.receive(PREFACE + sent("control", resets, -1))
    assert endpoint.connection.account.held == 0
    await endpoint.settle()
    assert set(map(tuple, endpoint.statuses().values())) == {(UNAVAILABLE,)}
    assert all(each.statuses() == {} for each in rest)
    for each in (other, *rest):
        each.lose()


async def test_small_messages_of_one_connection_are_refused_when_they_find_no_memory(endpoint):
    part = message(bytes(60_000))[:-1]
    for stream_id in range(1, 401, 2):
        endpoint.receive(head(stream_id, "ModelConfig"))
        for at in range(0, len(part), 16 * KIB):
            endpoint.receive(frame(DATA, 0, stream_id, part[at : at + 16 * KIB]))
    await endpoint.settle()
    statuses = endpoint.statuses()
    assert statuses
    assert set(map(tuple, statuses.values())) == {(UNAVAILABLE,)}
    assert endpoint.regions.budget.used <= 8 * MIB
    assert not endpoint.closed


async def test_a_call_whose_inputs_find_no_memory_is_refused_with_its_form(endpoint):
    """The charge of the form is the newest of all: it is what has to go when the inputs need memory."""
    request = raw(("A", "FP32", [VALUES], NOISE))
    request.parameters["x"].string_param = "y" * (100 * KIB)
    begun = [message(bytes(1000 * KIB))] * 7
    for number, data in enumerate([*begun, message(request.SerializeToString())]):
        stream_id = 2 * number + 1
        endpoint.receive(head(stream_id, "ModelConfig" if data in begun else "ModelInfer"))
        for at in range(0, len(data) - 16 * KIB, 16 * KIB):
            endpoint.receive(frame(DATA, 0, stream_id, data[at : at + 16 * KIB]))
    await endpoint.settle()
    assert endpoint.statuses() == {15: [UNAVAILABLE]}


async def test_a_header_block_counts_and_has_to_end(endpoint):
    block = head(1, "ModelConfig", ("x", "y" * 9000))[9:]
    endpoint.receive(frame(HEADERS, 0, 1, block[:4000]))
    endpoint.receive(frame(CONTINUATION, 0, 1, block[4000:8000]))
    assert endpoint.connection.http2.kept >= 7900
    endpoint.connection.check(0)
    assert not endpoint.connection.http2.closed
    endpoint.connection.check(61)
    assert endpoint.connection.http2.closed
    assert b"header block" in endpoint.sent


async def test_known_header_blocks_keep_little(endpoint):
    # A long field of the table, named by one byte in each of many different blocks.
    field = bytes((0x40, 1)) + b"a" + bytes((0x7F, 0x80 + (4000 - 127) % 128, (4000 - 127) // 128))
    base = bytes((0x83, 0x86)) + b"\0\5:path\2/x" + b"\1\1a"
    endpoint.receive(frame(HEADERS, 5, 1, base + field + b"v" * 4000))
    for number in range(255):
        block = base + bytes((0xBE,)) * 3 + b"\0\1k\4%04d" % number
        endpoint.receive(frame(HEADERS, 5, 3 + 2 * number, block))
    await endpoint.settle()
    assert len(endpoint.statuses()) == 256
    assert endpoint.connection.http2.kept == 0
    for number in range(3000):
        block = base + b"\0\1k\4%04d" % number
        endpoint.receive(frame(HEADERS, 5, 601 + 2 * number, block))
        await endpoint.settle()
    assert 0 < endpoint.connection.http2.kept <= 64 * KIB


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_that_does_not_come_is_not_waited_for(endpoint, kind):
    endpoint.receive(sent(kind, resets, 50_000 if "stream" in kind else 3))
    is_slow(endpoint)
    await endpoint.settle()
    assert endpoint.statuses() == {1: [DEADLINE_EXCEEDED]}


def addresses():
    return pages(0)


@pytest.mark.parametrize("kind", ["long form", "no model's", "control"])
async def test_a_promise_takes_no_addresses(endpoint, kind):
    """200 messages of 600 KB are promised, of which little comes."""
    before = addresses()
    method, _, data = KINDS[kind]
    for number in range(200):
        stream_id = 2 * number + 1
        endpoint.receive(head(stream_id, method) + frame(DATA, 0, stream_id, data[:5000]))
    assert addresses() - before < 150 * 600 * KIB


def test_memory_grows_by_what_came():
    memory = GrowingMemory(1 << 40)
    before = addresses()
    assert len(memory) == 1 << 40
    memory.resize(100)
    seen = memoryview(memory)
    seen[:] = b"x" * 100
    memory.resize(10 * MIB)
    assert len(seen) == 100
    assert bytes(memory[:100]) == bytes(seen) == b"x" * 100
    assert memoryview(memory).nbytes == 10 * MIB
    memory[200:300][:] = b"y" * 100
    memory.resize(20 * MIB)
    assert bytes(memory[190:201]) == bytes(10) + b"y"
    assert addresses() - before < 40 * MIB


def http_requests():
    body = NOISE
    coded = gzip.compress(body, 1)
    return {
        "plain": post(body),
        "small": post(body[: 60 * KIB]),
        "chunked": chunked(body, 10 * KIB),
        "compressed": post(coded, b"/echo", b"Content-Encoding: gzip"),
        "compressed and chunked": chunked(coded, 10 * KIB, b"/echo", b"Content-Encoding: gzip"),
    }


HTTP_KINDS = http_requests()


def http_is_slow(endpoint):
    for seconds in (0, 61, 122, 183):
        endpoint.connection.check(seconds)


def http_is_refused(endpoint):
    for body in list(budget_of(endpoint).arriving):
        body.refuse(BridgeError("full", ErrorCode.UNAVAILABLE))


HTTP_ENDS = {
    "leaves": lambda endpoint: endpoint.connection.connection_lost(None),
    "hangs up": lambda endpoint: endpoint.connection.eof_received(),
    "is slow": http_is_slow,
    "is refused": http_is_refused,
    "is aborted": lambda endpoint: endpoint.connection.abort(),
    "meets a stop": lambda endpoint: endpoint.connection.finish(),
}


def budget_of(endpoint):
    return endpoint.regions.budget if isinstance(endpoint, Server) else endpoint.listener.budget


async def break_off_http(make, data, end, cut):
    endpoint = make()
    endpoint.receive(data[:cut])
    HTTP_ENDS[end](endpoint)
    endpoint.connection.connection_lost(None)
    if isinstance(endpoint, Endpoint):
        await endpoint.listener.coded.tasks.finished()
        finish_work(endpoint.listener.coded._workers)
    assert endpoint.connection.account.held == 0
    assert not budget_of(endpoint).arriving
    if isinstance(endpoint, Server):
        assert endpoint.regions.lent() == (0, 0)
        endpoint.regions.close()
    for handler in getattr(endpoint, "handlers", ()):
        handler.release()
    assert budget_of(endpoint).used == 0


@pytest.mark.parametrize("end", HTTP_ENDS)
@pytest.mark.parametrize("kind", [*HTTP_KINDS, "infer"])
def test_nothing_is_left_of_an_http_request_that_is_broken_off(kind, end):
    def endpoint():
        return Endpoint(deferred=True, body_limit=4 * MIB)

    make, data = endpoint, HTTP_KINDS.get(kind)
    if data is None:
        make, data = Server, infer(NOISE, "large")

    async def at_every_stage():
        for cut in (10, 90, 200, 50 * KIB, 100 * KIB, 400 * KIB, -1, None):
            await break_off_http(make, data, end, cut)

    asyncio.run(break_off_http(make, data, end, -1))
    before = objects()
    asyncio.run(at_every_stage())
    assert objects() == before


def test_the_heads_of_requests_that_wait_are_charged():
    endpoint = Endpoint(deferred=True)
    for _ in range(20):
        endpoint.receive(b"GET /echo HTTP/1.1\r\nX: " + b"x" * 60_000 + b"\r\n\r\n")
    assert endpoint.connection.account.held > MIB
    for handler in list(endpoint.handlers):
        handler.answer()
    assert endpoint.connection.account.held == endpoint.listener.budget.used == 0
    endpoint.lose()


def test_heads_that_find_no_memory_end_their_connection():
    endpoint = Endpoint(deferred=True, arena_limit=MIB)
    for _ in range(30):
        endpoint.receive(b"GET /echo HTTP/1.1\r\nX: " + b"x" * 60_000 + b"\r\n\r\n")
    for handler in list(endpoint.handlers):
        if handler.exchange is not None:
            handler.answer()
    assert endpoint.answers()[-1][0] == 503
    assert endpoint.listener.budget.used == 0
    endpoint.lose()


NO_WAY_BACK = {
    *(
        "AccessLog",
        "GrowingMemory",
        "GrpcMethods",
        "HeaderFields",
        "Http2Limits",
        "IdleConnections",
    ),
    *(
        "GeneratedTemplate",
        "JsonResponseTemplate",
        "LeaseBook",
        "MessageResponseTemplate",
        "ModelCounters",
    ),
    *(
        "HttpOrigins",
        "RequestCounts",
        "RequestHeaders",
        "RequestShapes",
        "RequiredField",
        "SlotLists",
    ),
    *("CallCounts", "RequestRecord", "TraceSampling", "WatchedPages"),
}
"""Types that hold no object of Python, or only such as cannot lead back to them."""
OF_A_STUB = {
    *("BusyPoll", "CallChannel", "CallReader", "CallResponseReader", "CallWriter"),
    *("ContextCodec", "InFlightRequests", "RecordReader", "SendTurn", "StubLoop", "WaitPredictor"),
}
"""Types of which a stub, or its connection, has a few for as long as it lives, and no client more."""


def test_every_object_that_a_client_makes_is_known_to_the_collector():
    collected = 1 << 14
    unknown = {
        name
        for name, kind in vars(_native).items()
        if isinstance(kind, type) and not kind.__flags__ & collected
    }
    assert unknown == NO_WAY_BACK | OF_A_STUB
