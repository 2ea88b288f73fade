"""The probe, on a machine that has a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpubridge.cuda_ipc import probe_devices

pytestmark = pytest.mark.real_gpu


def probe_in_a_new_process(**variables):
    """Probe where other variables hold; return the count and the reason."""
    code = (
        "from gpubridge.cuda_ipc import probe_devices\n"
        "probe = probe_devices()\nprint(probe.count)\nprint(probe.reason)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    count, _, reason = finished.stdout.partition("\n")
    return int(count), reason.strip()


def test_every_gpu_is_counted_and_no_reason_given():
    found = probe_devices()
    assert found.count >= 1
    assert found.reason == ""


def test_cuda_visible_devices_holds():
    assert probe_in_a_new_process(CUDA_VISIBLE_DEVICES="0") == (1, "")


def test_hidden_gpus_are_an_absence_with_a_reason():
    count, reason = probe_in_a_new_process(CUDA_VISIBLE_DEVICES="")
    assert count == 0
    assert "CUDA_ERROR_NO_DEVICE" in reason


def test_counting_makes_no_context():
    from cuda.bindings import driver

    (code, context) = driver.cuCtxGetCurrent()
    assert code == driver.CUresult.CUDA_SUCCESS
    assert int(context) == 0
