"""Metrics of GPUs, with a double in the place of NVML."""

import sys
import threading
import types

import pytest

from gpubridge.telemetry.exposition import render
from gpubridge.telemetry.machine_metrics import MachineMetrics, open_gpu_metrics
from gpubridge.telemetry.settings import MetricsSettings


class NVMLError(Exception):
    pass


def fake_nvml(count=1, *, fails=False):
    """A module like pynvml, with its units; the second GPU cannot tell its power."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.energy = 5_000_000
    nvml.shut_down = 0

    def init():
        if fails:
            raise NVMLError("Driver Not Loaded")

    def power(gpu):
        if gpu:
            raise NVMLError("Not Supported")
        return 70_500

    def shutdown():
        nvml.shut_down += 1

    nvml.nvmlInit = init
    nvml.nvmlShutdown = shutdown
    nvml.nvmlDeviceGetCount = lambda: count
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda gpu: f"GPU-{gpu}".encode()
    nvml.nvmlDeviceGetUtilizationRates = lambda gpu: types.SimpleNamespace(gpu=42)
    nvml.nvmlDeviceGetMemoryInfo = lambda gpu: types.SimpleNamespace(total=1 << 34, used=1 << 30)
    nvml.nvmlDeviceGetPowerUsage = power
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 700_000
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: nvml.energy
    return nvml


@pytest.fixture
def nvml(monkeypatch):
    module = fake_nvml(2)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_tritons_names_and_units(nvml):
    gpus = open_gpu_metrics()
    gpus.families()
    nvml.energy += 2500
    page = render(gpus.families()).decode().splitlines()
    for line in (
        'nv_gpu_utilization{gpu_uuid="GPU-0"} 0.42',
        f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-1"}} {1 << 34}',
        f'nv_gpu_memory_used_bytes{{gpu_uuid="GPU-0"}} {1 << 30}',
        'nv_gpu_power_usage{gpu_uuid="GPU-0"} 70.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-0"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-0"} 2.5',
        "# TYPE nv_energy_consumption counter",
    ):
        assert line in page
    assert not any(line.startswith('nv_gpu_power_usage{gpu_uuid="GPU-1"}') for line in page)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "pynvml is not installed"),
        (fake_nvml(fails=True), "NVML cannot be used: Driver Not Loaded"),
        (fake_nvml(0), "there is none"),
    ],
)
def test_absence_is_a_reason(monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = open_gpu_metrics()
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_the_thread_that_asks_ends_with_its_owner(nvml):
    machine = MachineMetrics(MetricsSettings(cpu=False, interval_ms=1))
    assert next(family.name for family in machine.families()) == "nv_gpu_utilization"
    machine.close()
    assert "gpu-metrics" not in [thread.name for thread in threading.enumerate()]
    assert nvml.shut_down == 1


def test_without_a_gpu_there_is_no_thread(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = MachineMetrics(MetricsSettings(cpu=False))
    assert machine.families() == []
    machine.close()
