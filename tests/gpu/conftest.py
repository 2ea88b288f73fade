"""The machine that these tests run on: this one's GPUs, or the simulated driver's where it is asked for."""

import os
from pathlib import Path

import pytest

from gpubridge.cuda_ipc import probe_devices
from tests.gpu.clients import running_client
from tests.gpu.lane import SIMULATED, running_lane_machine
from tests.gpu.results import add_report

_HERE = Path(__file__).parent
# Of a test; of one that may hang, or needs the GPU for itself.
_SECONDS, _LAST_SECONDS = 120, 60


def pytest_collection_modifyitems(items):
    """Without a GPU, and not simulated, nothing of this folder can run: each test says why.

    Each has a limit, and what is marked `last` comes behind all others.
    """
    # Of thousands of items: a comparison of paths would cost more than all of their marks.
    ours = [item for item in items if str(item.path).startswith(f"{_HERE}{os.sep}")]
    if not ours:
        return
    reason = "" if SIMULATED else probe_devices().reason
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        last = item.get_closest_marker("last")
        if last is not None or item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LAST_SECONDS if last else _SECONDS))
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no GPU can be used: {reason}"))
        elif SIMULATED and item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason="needs what only a real GPU has"))
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_runtest_logreport(report):
    """Keep what each test came to."""
    add_report(report)


def pytest_collectreport(report):
    """Keep which file cannot be imported."""
    add_report(report)


@pytest.fixture(scope="session")
def lane_machine():
    """One machine for all files of a worker: servers on it are lent from file to file."""
    with running_lane_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def machine(lane_machine):
    """Machine of servers and clients; at the end of a file, no rule of a simulated driver was broken."""
    yield lane_machine
    if SIMULATED:
        assert lane_machine.violations() == []


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
