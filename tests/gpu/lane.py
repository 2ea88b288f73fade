"""The lane's machine and servers: a real GPU, or the simulated driver with GPUBRIDGE_TEST_SIMCUDA=1.

Whatever needs the driver alone runs on both, so that the tests themselves are tested without a GPU.
"""

import functools
import os
import sys
from contextlib import contextmanager

import pytest

from gpubridge.cuda_ipc import probe_devices
from gpubridge.cuda_ipc.device_check import check_device
from tests.commands import run_command
from tests.process.device_models import ARENA, DeviceServer
from tests.process.server import running_server

SIMULATED = os.environ.get("GPUBRIDGE_TEST_SIMCUDA") == "1"

# What says whether a library can use the GPU here, in a process that then ends.
_LOOK = {
    "driver": "pass",
    "torch": "import torch; assert torch.cuda.is_available(), 'PyTorch sees no GPU'",
    "cupy": "import cupy; assert cupy.cuda.runtime.getDeviceCount(), 'CuPy sees no GPU'",
    "cuda_shared_memory": "import tritonclient.utils.cuda_shared_memory as m; "
    "m.create_shared_memory_region('probe', 1 << 20, 0)",
}
# Models of others are not made, and no process starts that imports them.
LIBRARIES = tuple(os.environ.get("GPUBRIDGE_TEST_LIBRARIES", "driver torch cupy").split())


class _ThisMachine:
    """The GPUs of this machine, as they are."""

    def environment(self):
        return dict(os.environ)


@contextmanager
def running_lane_machine():
    """Give where servers and clients run."""
    if not SIMULATED:
        yield _ThisMachine()
        return
    from tests.simcuda.machine import lawful_machine

    with lawful_machine() as machine:
        machine.delay(200)
        yield machine


@functools.cache
def _absence(library):
    done = run_command([sys.executable, "-c", _LOOK[library]], timeout=110)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def needs_library(library):
    """Skip the test where a library cannot be used, and say why.

    A simulated driver is no GPU to a library that brings CUDA's runtime along.
    """
    if library == "driver":
        return
    if SIMULATED:
        pytest.skip(f"{library} needs a real GPU")
    reason = _absence(library)
    if reason:
        pytest.skip(f"{library}: {reason}")


class LaneServer(DeviceServer):
    """A server on the lane's machine, and what its models cost."""

    @contextmanager
    def costing(self, model, *, waits=(0, 0), **expected):
        """Check copies exactly, ``h2d=(bytes, copies)`` and so on, and waits between two bounds."""
        before = self.work(model)
        yield
        after = self.work(model)
        spent = {key: after[key] - before[key] for key in after}
        done = {
            kind: (spent[kind, "copied_bytes"], spent[kind, "copies"])
            for kind in ("h2d", "d2h", "d2d")
        }
        wanted = {"h2d": (0, 0), "d2h": (0, 0), "d2d": (0, 0), **expected}
        assert done == wanted, f"copies: expected {wanted}, got {done}"
        assert waits[0] <= spent["waits"] <= waits[1], f"{spent['waits']} waits"


@functools.cache
def events_used():
    """Return whether models wait for each other on the first GPU, as a server would find out."""
    if SIMULATED:
        return True
    check = check_device(probe_devices().devices[0].uuid)
    return check.events.works and check.lost_events.works


@contextmanager
def running_lane_server(machine, repository, *flags, arena=ARENA, environment=None):
    """Serve a repository on the lane's machine; ``environment`` goes with the machine's own."""
    flags = (
        f"--backend-config=python,device-arena-bytes={arena}",
        # Tried before: what the first requests cost is asserted, too.
        f"--backend-config=python,device-events={'share' if events_used() else 'wait'}",
        "--allow-client-shm=true",
        *flags,
    )
    wanted = {**machine.environment(), **(environment or {})}
    # What is this process's own, as the name of the test, would keep a server from being lent to another file.
    changed = {name: text for name, text in wanted.items() if os.environ.get(name) != text}
    with running_server(repository, *flags, environment=changed) as server:
        yield LaneServer(server, machine)
