"""The lane's first page says what a driver does and does not, on machines that are made so."""

import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.simcuda.machine import lawful_machine

ROOT = Path(__file__).parents[2]
MEMORY = "a process opens another one's memory by a legacy handle"
PINNED = "shared host memory can be pinned"


@pytest.fixture
def simulated():
    with lawful_machine() as machine:
        yield machine


def page(machine):
    code = "from tests.gpu.first_page import first_page\nprint(*first_page(), sep='\\n')"
    done = run_command(
        [sys.executable, "-c", code],
        env=dict(machine.environment()),
        cwd=ROOT,
        timeout=110,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_driver_that_does_all_of_it(simulated):
    lines = page(simulated)
    assert f"  yes {MEMORY}" in lines
    assert f"  yes {PINNED}" in lines
    assert sum("who waits for a killed process" in line for line in lines) == 2
    # These two GPUs do not reach each other.
    assert sum(line.startswith("  NO  GPUs reach each other's memory: ") for line in lines) == 2


def test_gpus_that_reach_each_other(simulated):
    simulated.allow_peers()
    assert page(simulated)[-1] == "  yes GPUs reach each other's memory"


def test_a_driver_that_does_not(simulated):
    simulated.set_devices(1)
    simulated.refuse_legacy_handles()
    simulated.fail("cuMemHostRegister", 801)
    lines = page(simulated)
    assert [line for line in lines if line.startswith(f"  NO  {MEMORY}: ")]
    assert [line for line in lines if line.startswith(f"  NO  {PINNED}: ")]


def test_no_gpu_at_all(simulated):
    simulated.set_devices(0)
    (line,) = page(simulated)
    assert line.startswith("no GPU can be used: ")
