"""Clients' CUDA memory in the registry: streams get a moment to be done with it."""

import asyncio

import pytest

from gpubridge.engine.client_regions import ClientPlace, ClientRegion, ClientRegions, RegionUse
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.regions import Regions
from gpubridge.errors import BridgeError, ErrorCode


class Memory:
    region = 1 << 32 | 1

    def has(self, end):
        return True


@pytest.mark.parametrize("name", ["m", ""])
async def test_memory_that_a_stream_is_soon_done_with_can_be_unregistered(monkeypatch, name):
    regions = Regions(1 << 20)
    registry = ClientRegions(regions, DeviceManager(0), allowed=True, most=4)
    region = registry._registered["m"] = ClientRegion("m", "", 0, 64, Memory(), 0)
    uses = [RegionUse([ClientPlace(region, 0, 8)], ())]
    # One whom it is in use for stays.
    with pytest.raises(BridgeError) as caught:
        await registry.unregister_device(name)
    assert caught.value.code == ErrorCode.INTERNAL
    assert registry.status("m", on_device=True) == [region]
    passed = []

    async def pass_time(seconds):
        passed.append(seconds)
        # The turns of twenty processes, of 20 ms each.
        if sum(passed) > 0.4:
            uses.clear()

    monkeypatch.setattr(asyncio, "sleep", pass_time)
    await registry.unregister_device(name)
    assert registry.status(on_device=True) == []
    regions.close()
