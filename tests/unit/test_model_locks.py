"""Locks of models: they are waited for, except where that would never end."""

import asyncio
from contextvars import copy_context

import pytest

from gpubridge.engine.repository.locks import ASKED_BY, ModelLocks
from gpubridge.errors import BridgeError, ErrorCode
from tests.waits import until


class Loads:
    """Loads of models, each of which asks for others in its initialize."""

    def __init__(self, asks):
        self.asks = asks
        self.locks = ModelLocks()
        self.loaded, self.held = set(), set()
        self.refused = []

    async def load(self, name, together=1):
        async with self.locks.change(name):
            self.held.add(name)
            await until(lambda: len(self.held) >= together)
            if name in self.loaded:
                return
            for other in self.asks.get(name, ""):
                await self.ask(name, other)
            self.loaded.add(name)

    async def ask(self, asker, name):
        context = copy_context()
        context.run(ASKED_BY.set, asker)
        task = context.run(asyncio.get_running_loop().create_task, self.load(name))
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if error is not None:
            assert isinstance(error, BridgeError)
            assert error.code == ErrorCode.UNAVAILABLE
            assert f"'{asker}' waits for a change of '{name}'" in error.message
            self.refused.append(asker + name)


@pytest.mark.parametrize(
    ("asks", "first", "refused"),
    [
        ({"a": "b", "b": "c"}, "a", []),
        ({"a": "bc", "b": "c"}, "abc", []),
        ({"a": "a"}, "a", ["aa"]),
        ({"a": "b", "b": "a"}, "a", ["ba"]),
        ({"a": "b", "b": "c", "c": "a"}, "a", ["ca"]),
        ({"a": "b", "b": "c", "c": "b"}, "a", ["cb"]),
    ],
)
async def test_a_chain_ends_and_a_circle_is_refused_once(asks, first, refused):
    loads = Loads(asks)
    await asyncio.wait_for(asyncio.gather(*map(loads.load, first)), 10)
    assert loads.refused == refused
    assert loads.loaded == set(asks) | set("".join(asks.values()))
    assert not loads.locks._waits


async def test_loads_that_begin_at_the_same_time_and_ask_for_each_other():
    loads = Loads({"a": "b", "b": "c", "c": "a"})
    await asyncio.wait_for(asyncio.gather(*(loads.load(name, 3) for name in "abc")), 10)
    assert len(loads.refused) == 1
    assert loads.loaded == set("abc")


async def test_changes_of_one_model_wait_for_each_other():
    locks = ModelLocks()
    order = []

    async def change(name):
        async with locks.change("m"):
            order.append(name)
            await asyncio.sleep(0)
            order.append(name)

    await asyncio.wait_for(asyncio.gather(change(1), change(2)), 10)
    assert order == [1, 1, 2, 2]
