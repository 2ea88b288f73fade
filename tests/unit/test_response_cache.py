"""The response cache alone: its limit, its order, and what a change of models removes."""

import asyncio
from types import SimpleNamespace

import pytest

from gpubridge.engine.memory.placed_response import PlacedResponse
from gpubridge.engine.response_cache import CachedSubmission, ResponseCache
from gpubridge.request import NO_BYTES, NO_CONTEXT, InferRequest
from gpubridge.telemetry.statistics import ModelStatistics
from gpubridge.transport.signatures import Signature, TensorSpec, encode_tensors

SIGNATURE = Signature((TensorSpec("OUT", "UINT8", 1, 1),), ())
PLAIN = SimpleNamespace(name="m", executed_by=("m",))
OTHER = SimpleNamespace(name="n", executed_by=("n",))
ENSEMBLE = SimpleNamespace(name="e", executed_by={"m", "n"})
OF_ENTRY = 1024 + 256
"""What is counted beside the bytes of one output."""


def response(nbytes, parameters=None):
    return PlacedResponse(
        SIGNATURE, ((nbytes,),), [memoryview(bytes(nbytes))], parameters, [NO_BYTES]
    )


def test_the_sum_of_all_entries_never_exceeds_the_limit():
    cache = ResponseCache(3 * (OF_ENTRY + 100))
    for number in range(10):
        cache.add(b"%d" % number, PLAIN, response(100))
        assert cache.used <= cache.limit
    assert cache.used == cache.limit
    assert [cache.find(b"%d" % number) is not None for number in range(10)] == [False] * 7 + [
        True
    ] * 3
    cache.add(b"larger", PLAIN, response(200))
    assert cache.used <= cache.limit
    assert cache.find(b"larger") is not None


def test_one_that_exceeds_the_limit_by_itself_removes_nothing():
    cache = ResponseCache(OF_ENTRY + 8)
    cache.add(b"a", PLAIN, response(8))
    cache.add(b"b", PLAIN, response(9))
    cache.add(b"c", PLAIN, response(8, {"p": 1}))
    assert (cache.find(b"b"), cache.find(b"c"), cache.find(b"a") is not None) == (None, None, True)


def test_the_first_of_equal_ones_stays():
    cache = ResponseCache(10_000)
    first = response(8)
    cache.add(b"a", PLAIN, first)
    used = cache.used
    cache.add(b"a", PLAIN, response(8))
    assert cache.find(b"a") is first
    assert cache.used == used


@pytest.mark.parametrize(("changed", "left"), [("m", [OTHER]), ("x", [PLAIN, OTHER])])
def test_a_change_removes_the_models_and_all_ensembles_responses(changed, left):
    cache = ResponseCache(100_000)
    models = PLAIN, OTHER, ENSEMBLE
    for model in models:
        cache.add(model.name.encode(), model, response(8))
    cache.model_changed(changed)
    assert [model for model in models if cache.find(model.name.encode())] == left
    assert cache.used == len(left) * (OF_ENTRY + 8)
    assert cache.generation == 1


class Workers:
    """Workers that compute when they are told to."""

    def __init__(self):
        self.go_on = asyncio.Event()

    async def outcome(self, work):
        await self.go_on.wait()
        return work()


async def test_who_unloads_a_model_waits_for_long_requests_that_are_looked_up():
    workers, submitted = Workers(), []
    model = SimpleNamespace(
        name="m", config=SimpleNamespace(outputs=()), statistics=ModelStatistics("m", 1)
    )
    submission = CachedSubmission(
        ResponseCache(1000),
        model,
        lambda request, _: submitted.append(request),
        lambda _: None,
        workers,
    )
    nbytes = (1 << 20) + 1
    signature, dims = encode_tensors([("IN", "UINT8", (nbytes,))])
    slot = SimpleNamespace(memory=memoryview(bytes(nbytes)))
    request = InferRequest(
        signature, slot, 0, [(0, nbytes)], lambda _: None, context=NO_CONTEXT, dims=dims
    )
    submission(request)
    waiting = asyncio.ensure_future(submission.finished())
    await asyncio.sleep(0)
    assert (waiting.done(), submitted) == (False, [])
    workers.go_on.set()
    await waiting
    assert submitted == [request]
    assert model.statistics.cache_misses == 1
