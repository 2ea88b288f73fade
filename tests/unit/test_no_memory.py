"""A message that the system has no memory for, or no addresses, fails alone."""

import resource
from contextlib import contextmanager

import pytest

from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode, NoMemory
from gpubridge.frontend.grpc.status import framing_failure
from gpubridge.host_shm import Account, Body
from gpubridge.telemetry.logs import request_error
from tests.fuzz.grpc_endpoint import PREFACE, GrpcEndpoint, frame, head, message
from tests.unit.grpc_requests import raw
from tests.unit.http_endpoint import GET, Endpoint, chunked, post
from tests.unit.test_wire_memory import KIB, KINDS, MIB, addresses, resets, sent

RESOURCE_EXHAUSTED = 8
SMALL = message(raw(("A", "FP32", [1], b"abcd")).SerializeToString())


@contextmanager
def addresses_for(nbytes):
    """Leave this process so many bytes of addresses to map."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (addresses() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("kind", ["control", "compressed", "no model's", "long form", "stream"])
async def test_a_message_without_memory_fails_alone(kind):
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE + sent(kind, resets, 1))
    endpoint.receive(head(3, "ModelInfer") + frame(0, 1, 3, SMALL))
    data = KINDS[kind][2]
    frames = [frame(0, 0, 1, data[at : at + 9999]) for at in range(1, len(data) - 1, 9999)]
    with addresses_for(100 * KIB):
        for each in frames:
            endpoint.receive(each)
    await endpoint.settle()
    assert endpoint.statuses() == {1: [RESOURCE_EXHAUSTED], 3: [0]}
    assert b"no memory" in endpoint.sent
    endpoint.receive(head(5, "ModelInfer") + frame(0, 1, 5, SMALL))
    await endpoint.settle()
    assert endpoint.statuses()[5] == [0]
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
    assert endpoint.regions.budget.used == 0


@pytest.mark.parametrize(
    "framed", [post, lambda body: chunked(body, MIB)], ids=["plain", "chunked"]
)
def test_a_body_without_memory_fails_alone(framed):
    # More than earlier tests may have left mapped and free: of that no addresses are asked for.
    endpoint = Endpoint(deferred=True, body_limit=256 * MIB, arena_limit=512 * MIB)
    endpoint.receive(post(b"first"))
    request = framed(bytes(192 * MIB)) + GET
    with addresses_for(4 * MIB):
        endpoint.receive(request)
    for handler in endpoint.handlers:
        if handler.exchange is not None:
            handler.answer()
    assert [status for status, _ in endpoint.answers()] == [200, 503, 200]
    assert b"no memory" in endpoint.transport.sent
    endpoint.lose()
    assert endpoint.connection.account.held == endpoint.listener.budget.used == 0


def test_missing_memory_is_no_bug_and_has_a_status_of_its_own():
    assert isinstance(request_error(MemoryError()), NoMemory)
    assert isinstance(framing_failure(5, 0, 0), NoMemory)
    assert type(NoMemory().copy()) is NoMemory


class Promised:
    """A body that has addresses for more than comes."""

    def __init__(self, arena, account, nbytes):
        self.arena = arena
        self.errors: list[BridgeError] = []
        self.slot = arena.reserve(nbytes, Body(arena.budget, account, self.refuse))
        arena.grow(self.slot, 0, nbytes)

    def refuse(self, error):
        self.errors.append(error)
        self.arena.free(self.slot)


def test_who_was_promised_most_gives_addresses_back():
    regions = Regions(64 * MIB)
    arena = regions.arena("m")
    greedy, modest = Account(int), Account(int)
    first = Promised(arena, modest, 40 * MIB)
    many = [Promised(arena, greedy, 50 * MIB) for _ in range(12)]
    refused = [body for body in many if body.errors]
    assert len(many) - len(refused) <= 4
    assert {error.code for body in refused for error in body.errors} == {ErrorCode.UNAVAILABLE}
    # Others find addresses, and go on.
    slot = arena.reserve(50 * MIB, Body(arena.budget, modest, lambda _: None))
    assert not first.errors
    arena.free(slot)
    for body in (first, *many):
        if not body.errors:
            arena.free(body.slot)
    assert greedy.promised == modest.promised == greedy.held == 0
    assert arena.lent() == (0, 0)
    regions.close()


async def test_a_client_that_promises_much_leaves_addresses_to_others():
    endpoint = GrpcEndpoint(deferred=True)
    endpoint.receive(PREFACE)
    whole = sent("long", resets, None)
    for stream_id in range(1, 401, 2):
        begun = KINDS["long"][2][:200]
        endpoint.receive(head(stream_id, "ModelInfer") + frame(0, 0, stream_id, begun))
    other = GrpcEndpoint(beside=endpoint)
    other.receive(PREFACE + whole)
    await endpoint.settle()
    await other.settle()
    assert other.statuses() == {1: [0]}
    other.lose()
    endpoint.lose()
    assert endpoint.regions.lent() == (0, 0)
    endpoint.regions.close()
