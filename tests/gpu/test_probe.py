"""The probe, each time in a process of its own."""

import json
import sys
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
PROBE = """
import json
from gpubridge.cuda_ipc import probe_devices
probe = probe_devices()
answer = [probe.count, probe.reason]
"""
CONTEXTS = """
from cuda.bindings import driver
code, current = driver.cuCtxGetCurrent()
answer.append(int(code) or int(current))
for device in probe.devices:
    code, _, active = driver.cuDevicePrimaryCtxGetState(device.ordinal)
    answer.append(int(code) or active)
"""


def probed(machine, more="", **variables):
    """Return what a new process finds, where other variables hold."""
    done = run_command(
        [sys.executable, "-c", f"{PROBE}{more}\nprint(json.dumps(answer))"],
        env={**machine.environment(), **variables},
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_every_gpu_is_counted_and_no_reason_given(machine):
    count, reason = probed(machine)
    assert count >= 1
    assert reason == ""


@pytest.mark.real_gpu
def test_cuda_visible_devices_holds(machine):
    assert probed(machine, CUDA_VISIBLE_DEVICES="0") == [1, ""]


@pytest.mark.real_gpu
def test_hidden_gpus_are_an_absence_with_a_reason(machine):
    count, reason = probed(machine, CUDA_VISIBLE_DEVICES="")
    assert count == 0
    assert "CUDA_ERROR_NO_DEVICE" in reason


def test_counting_makes_no_context(machine):
    count, reason, *contexts = probed(machine, CONTEXTS)
    assert (count >= 1, reason) == (True, "")
    # None is current, and no device has one.
    assert contexts == [0] * (1 + count)
