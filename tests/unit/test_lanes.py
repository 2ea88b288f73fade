"""The lanes reach the process of tests and those that it starts, and find what is held by nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import lanes
from tests.lanes import sitecustomize

TESTS = Path(lanes.__file__).parent.parent
# A task that only itself holds is garbage. The collector usually searches each 700 allocations.
PROGRAM = """
import asyncio, gc, json, sys

async def waits():
    await asyncio.get_running_loop().create_future()

async def main():
    for _ in range(10):
        asyncio.ensure_future(waits())
    await asyncio.sleep(0)
    kept = [[] for _ in range(400)]
    return len(asyncio.all_tasks()) - 1

gc.freeze()
left = asyncio.run(main())
json.dump([left, sys.getswitchinterval()], sys.stdout)
"""


@pytest.mark.parametrize("lane", [sitecustomize.GC, sitecustomize.SWITCH])
def test_a_lane_reaches_processes_that_are_started(lane):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(lanes.__file__).parent),
        sitecustomize.VARIABLE: lane,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, text=True
    )
    left, interval = json.loads(done.stdout)
    assert (left, interval) == ((0, 0.005) if lane == sitecustomize.GC else (10, 1e-6))


def test_the_files_of_lanes_are_there():
    assert [name for name in lanes.FILES if not (TESTS / name).exists()] == []


def test_a_lane_runs_its_files_alone():
    left_out = []
    hook = SimpleNamespace(pytest_deselected=lambda *, items: left_out.extend(items))
    config = SimpleNamespace(getoption=lambda name: name == "--switch-often", hook=hook)
    other, of_lane = (
        SimpleNamespace(path=TESTS / "unit" / name)
        for name in ("test_budget.py", "test_response_credit.py")
    )
    items = [other, of_lane]
    lanes.select(config, items)
    assert (items, left_out) == ([of_lane], [other])
