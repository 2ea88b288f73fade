"""The machine that these tests run on: this one's GPUs, or the simulated driver's where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpubridge.cuda_ipc import check_device, probe_devices
from tests.gpu.clients import running_client
from tests.gpu.lane import SIMULATED, running_lane_machine

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Without a GPU, and not simulated, nothing of this folder can run: each test says why."""
    ours = [item for item in items if _HERE in item.path.parents]
    if not ours:
        return
    reason = "" if SIMULATED else probe_devices().reason
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no GPU can be used: {reason}"))
        elif SIMULATED and item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs what only a real GPU has"))


def pytest_report_header():
    """Say what two processes can do with each GPU: what fails for want of it is no fault of the house."""
    if SIMULATED:
        return ["GPUs: simulated"]
    return [
        f"{device.name} ({device.uuid}): {', '.join(_abilities(device))}"
        for device in probe_devices().devices
    ]


def _abilities(device):
    check = check_device(device.uuid)
    found = {
        "memory by legacy handles": check.memory,
        "memory by VMM file descriptors": check.memory_fds,
        "events": check.events,
        "events of a killed process": check.lost_events,
        "pinning": check.pinning,
    }
    return [f"{name}: {'works' if a.works else a.reason}" for name, a in found.items()]


@pytest.fixture(scope="module")
def machine():
    """Machine of servers and clients; at the end, no rule of a simulated driver was broken."""
    with running_lane_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def client(machine):
    """A client's process with memory of its own on the GPUs."""
    with running_client(machine) as client:
        yield client


@pytest.fixture
def rng():
    """Random data that is new in each run; the seed is in the report of a failure."""
    import numpy as np

    seed = int(os.environ.get("GPUBRIDGE_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"GPUBRIDGE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
