"""Triton's metrics of GPUs, asked from NVML through ``pynvml`` where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from gpubridge.telemetry.exposition import Family

__all__ = ["GpuMetrics", "open_gpu_metrics"]

_Read = Callable[[Any, Any], float]

# Joules and watts, where NVML has thousandths; a share, where it has percents.
_FAMILIES: tuple[tuple[str, str, str, _Read], ...] = (
    (
        "nv_gpu_utilization",
        "GPU utilization rate [0.0 - 1.0)",
        "gauge",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "nv_gpu_memory_total_bytes",
        "GPU total memory, in bytes",
        "gauge",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    ),
    (
        "nv_gpu_memory_used_bytes",
        "GPU used memory, in bytes",
        "gauge",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    (
        "nv_gpu_power_usage",
        "GPU power usage in watts",
        "gauge",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    (
        "nv_gpu_power_limit",
        "GPU power management limit in watts",
        "gauge",
        lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    ),
    (
        "nv_energy_consumption",
        "GPU energy consumption in joules since the server started",
        "counter",
        lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    ),
)
_ENERGY = "nv_energy_consumption"


class GpuMetrics:
    """The GPUs of this machine; owns the NVML session.

    Parameters
    ----------
    nvml : module
        ``pynvml``, initialized.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(gpu)
            self._gpus[uuid.decode() if isinstance(uuid, bytes) else uuid] = gpu
        self._energy_at_start: dict[str, float] = {}

    def families(self) -> list[Family]:
        """Return what can be read now; a GPU that cannot tell a value has no sample of it."""
        families = []
        for name, text, kind, read in _FAMILIES:
            family = Family(name, text, kind)
            for uuid, gpu in self._gpus.items():
                try:
                    value = read(self._nvml, gpu)
                except self._nvml.NVMLError:
                    continue
                if name == _ENERGY:
                    value -= self._energy_at_start.setdefault(uuid, value)
                family.add({"gpu_uuid": uuid}, value)
            families.append(family)
        return families

    def close(self) -> None:
        """End the session."""
        self._nvml.nvmlShutdown()


def open_gpu_metrics() -> GpuMetrics | str:
    """Open NVML; returns the reason where there is nothing to measure."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "pynvml is not installed; run: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML cannot be used: {error}"
    try:
        if nvml.nvmlDeviceGetCount():
            return GpuMetrics(nvml)
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        return f"NVML cannot be used: {error}"
    nvml.nvmlShutdown()
    return "there is none"
