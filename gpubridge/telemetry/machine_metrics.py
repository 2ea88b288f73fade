"""Triton's metrics of the machine: CPU, memory and GPUs."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpubridge.telemetry.exposition import Family
from gpubridge.telemetry.settings import MetricsSettings

_ENERGY_TEXT = "GPU energy consumption in joules since the server started"

# Name, text, NVML function, field of its result, and divisor: NVML has percents, mJ and mW.
_FAMILIES = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", "UtilizationRates", "gpu", 100),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", "MemoryInfo", "total", 1),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", "MemoryInfo", "used", 1),
    ("nv_gpu_power_usage", "GPU power usage in watts", "PowerUsage", "", 1000),
    ("nv_gpu_power_limit", "GPU power management limit in watts", "EnforcedPowerLimit", "", 1000),
    ("nv_energy_consumption", _ENERGY_TEXT, "TotalEnergyConsumption", "", 1000),
)

_ENERGY = "nv_energy_consumption"
_logger = logging.getLogger(__name__)
_DRIVER = Path("/dev/nvidiactl")
"""Exists if the NVIDIA driver is loaded; then missing GPU metrics are logged."""


class GpuMetrics:
    """Metrics of the GPUs; owns the initialized NVML session."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(gpu)
            self._gpus[uuid.decode() if isinstance(uuid, bytes) else uuid] = gpu
        self._energy_at_start: dict[str, float] = {}

    def families(self) -> list[Family]:
        """Return the current metrics, without values that a GPU does not support."""
        families = []
        for name, text, function, field, unit in _FAMILIES:
            family = Family(name, text, "counter" if name == _ENERGY else "gauge")
            read = getattr(self._nvml, f"nvmlDeviceGet{function}")
            for uuid, gpu in self._gpus.items():
                try:
                    found = read(gpu)
                except self._nvml.NVMLError:
                    continue
                value: float = (getattr(found, field) if field else found) / unit
                if name == _ENERGY:
                    value -= self._energy_at_start.setdefault(uuid, value)
                family.add({"gpu_uuid": uuid}, value)
            families.append(family)
        return families

    def close(self) -> None:
        """End the session."""
        self._nvml.nvmlShutdown()


def open_gpu_metrics() -> GpuMetrics | str:
    """Open NVML; return the reason if there is nothing to measure."""
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


class MachineMetrics:
    """Metrics of the machine, measured once per interval; GPUs by a thread, as NVML may be slow."""

    def __init__(self, settings: MetricsSettings) -> None:
        self._interval = settings.interval_ms / 1000
        self._cpu = _CpuMetrics() if settings.cpu else None
        self._measured: list[Family] = []
        self._due = 0.0
        self._gpu_families: list[Family] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if settings.gpu:
            self._measure_gpus()

    def families(self) -> list[Family]:
        """Return the metrics."""
        now = time.monotonic()
        if self._cpu is not None and now >= self._due:
            self._due = now + self._interval
            self._measured = self._cpu.families()
        return [*self._gpu_families, *self._measured]

    def close(self) -> None:
        """End the thread that measures the GPUs."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._interval + 1.0)

    def _measure_gpus(self) -> None:
        gpus = open_gpu_metrics()
        if isinstance(gpus, str):
            level = logging.INFO if _DRIVER.exists() else logging.DEBUG
            _logger.log(level, "no GPU is measured: %s", gpus)
            return
        self._gpu_families = gpus.families()
        self._thread = threading.Thread(
            target=self._poll_gpus, args=(gpus,), name="gpu-metrics", daemon=True
        )
        self._thread.start()

    def _poll_gpus(self, gpus: GpuMetrics) -> None:
        while not self._ended.wait(self._interval):
            self._gpu_families = gpus.families()
        gpus.close()


class _CpuMetrics:
    """Metrics of CPU and memory; the utilization is that since the last call."""

    def __init__(self) -> None:
        self._seen = _cpu_times()

    def families(self) -> list[Family]:
        busy, total = _cpu_times()
        seen_busy, seen_total = self._seen
        self._seen = busy, total
        share = (busy - seen_busy) / (total - seen_total) if total > seen_total else 0.0
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return _gauges(
            (
                ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", share),
                ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory),
                (
                    "nv_cpu_memory_used_bytes",
                    "CPU used memory (RAM), in bytes",
                    memory - _available_bytes(),
                ),
            )
        )


def _gauges(rows: Iterable[tuple[str, str, float]]) -> list[Family]:
    families = []
    for name, text, value in rows:
        family = Family(name, text, "gauge")
        family.add({}, value)
        families.append(family)
    return families


def _cpu_times() -> tuple[int, int]:
    """Return the busy ticks and all ticks since boot."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


def _available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
