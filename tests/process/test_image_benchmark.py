"""The benchmark of image_preproc's kernel, where there is no speed: that it runs, checks, and says so."""

import sys

import pytest

from tests.commands import run_command
from tests.host_kernel.simulated import imaging_environment
from tests.simcuda.machine import lawful_machine, running_machine


def run(environment, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu_image_kernel", *arguments]
    return run_command(command, env=environment)


@pytest.mark.parametrize(
    "dtype",
    ["FP32", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("FP16", "UINT8"))],
)
def test_it_measures_a_kernel_whose_values_are_right(tmp_path, dtype):
    with lawful_machine() as machine:
        environment = {**machine.environment(), **imaging_environment(tmp_path)}
        done = run(environment, "--quick", f"--dtype={dtype}")
        assert done.returncode == 0, done.stderr
        assert "| 60 x 45 | 2 |" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    with running_machine() as machine:
        machine.set_devices(0)
        done = run({**machine.environment(), **imaging_environment(tmp_path)})
        assert done.returncode == 1
        assert "error: no GPU can be used" in done.stderr
