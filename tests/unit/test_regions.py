"""Memory mapped by each stub, and the time at which it is told to unmap it."""

import asyncio

import pytest

from gpubridge.engine.memory.regions import Regions


class Stub:
    def __init__(self):
        self.dropped = []

    def drop_region(self, region):
        self.dropped.append(region)


@pytest.fixture
def regions():
    regions = Regions(1 << 20)
    yield regions
    regions.close()


async def turn():
    await asyncio.sleep(0)


async def test_regions_of_an_ended_maker_are_dropped_by_their_readers(regions):
    owner, stub, other = regions.new_owner(), Stub(), Stub()
    first, second = owner << 32 | 1, owner << 32 | 2
    regions.join(first, stub)
    regions.join(second, other)
    await turn()
    assert (stub.dropped, other.dropped) == ([], [])
    regions.retire(owner, [first, second])
    assert (stub.dropped, other.dropped) == ([first], [second])


async def test_regions_of_a_dead_maker_are_dropped_after_their_message(regions):
    owner, stub = regions.new_owner(), Stub()
    region = owner << 32 | 1
    regions.retire(owner, [region])
    for times in (1, 2):
        regions.join(region, stub)
        # The message that needs it is sent in this turn of the loop.
        assert len(stub.dropped) == times - 1
        await turn()
        assert stub.dropped == [region] * times


async def test_memory_for_requests_stays_mapped(regions):
    stub = Stub()
    slot = regions.arena("m").allocate(100)
    region = slot.segment.region
    regions.join(region, stub)
    await turn()
    assert stub.dropped == []
    regions.arena("m").free(slot)
    regions.arena("m").trim(0)
    assert stub.dropped == [region]
