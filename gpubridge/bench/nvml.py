"""The bytes that a GPU has sent and received over PCIe, counted by NVIDIA's management library.

It is called by ctypes: it comes with the driver, and no package is needed.

``python -m gpubridge.bench.nvml UUID`` samples the counters in a process that the benchmark does not delay,
until its input ends. Its first line is the link's rate in bytes per second, or ``-``, the reason why there
are no counters, and whether no other meter applies. Each further line has the moments before and after a
reading, and both counters.
"""

from __future__ import annotations

import ctypes
import json
import select
import sys
import time
from typing import Any, ClassVar, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_SENT, _RECEIVED = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, _RX_BYTES
_VIRTUAL = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU: this system is a guest with a part of a GPU
# Bytes per second of a lane, by the generation of the link.
_LANES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_FASTEST = 16 * _LANES[6]
_INTERVAL = 0.01
_LONGEST_RELEASE = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


class NotCounted(Exception):
    """The reason why a GPU's PCIe bytes are not counted; ``unmetered`` if no other meter applies."""

    def __init__(self, reason: str, *, unmetered: bool = False) -> None:
        super().__init__(reason)
        self.unmetered = unmetered


class PcieBytes(NamedTuple):
    """Readings of both counters, which wrap to 0."""

    received: int
    sent: int


class _FieldValue(ctypes.Structure):
    """NVML's ``nvmlFieldValue_t``: 40 bytes."""

    _fields_: ClassVar = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class GpuFacts(NamedTuple):
    """Facts of a GPU as NVML tells them: the driver's release, the number that nvidia-smi gives the GPU, its link."""

    driver: str
    number: int
    generation: int
    width: int
    most_generation: int
    most_width: int


class _Gpu:
    """One GPU, by its UUID. Raises NotCounted where NVML does not know it."""

    def __init__(self, device: str) -> None:
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NotCounted(f"{_LIBRARY} cannot be loaded: {error}") from None
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", device.encode(), ctypes.byref(self._device))

    def facts(self) -> GpuFacts:
        """Return its facts; 0 for a number that NVML does not tell."""
        driver = ctypes.create_string_buffer(_LONGEST_RELEASE)
        self._call("nvmlSystemGetDriverVersion", driver, _LONGEST_RELEASE)
        numbers = map(
            self._number,
            (
                "nvmlDeviceGetIndex",
                "nvmlDeviceGetCurrPcieLinkGeneration",
                "nvmlDeviceGetCurrPcieLinkWidth",
                "nvmlDeviceGetMaxPcieLinkGeneration",
                "nvmlDeviceGetMaxPcieLinkWidth",
            ),
        )
        return GpuFacts(driver.value.decode(), *numbers)

    def _number(self, name: str) -> int:
        """Return a number of the device from NVML; 0 if it fails."""
        number = ctypes.c_uint()
        function = getattr(self._library, name, None)
        failed = function is None or function(self._device, ctypes.byref(number))
        return 0 if failed else number.value

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise NotCounted(f"the driver is too old: {_LIBRARY} has no {name}")
        if code := function(*arguments):
            raise NotCounted(f"{name} failed: {self._text(code)}")

    def _text(self, code: int) -> str:
        return str(self._library.nvmlErrorString(code).decode())


def gpu_facts(device: str) -> GpuFacts | None:
    """Return the facts of a GPU by its UUID; None where NVML does not tell them, as for a part of a GPU."""
    try:
        return _Gpu(device).facts()
    except NotCounted:
        return None


class PcieCounters(_Gpu):
    """The counters of one GPU, by its UUID. Raises NotCounted if the driver, or the device, has none."""

    def __init__(self, device: str) -> None:
        if device.startswith("MIG-"):
            reason = "the device is a part of a GPU (MIG), and PCIe is metered for whole GPUs only"
            raise NotCounted(reason, unmetered=True)
        super().__init__(device)
        if self._number("nvmlDeviceGetVirtualizationMode") == _VIRTUAL:
            reason = "the GPU is a virtual one (vGPU), whose PCIe link is not metered"
            raise NotCounted(reason, unmetered=True)
        self.read()

    @property
    def fastest(self) -> float:
        """Bytes per second that the link can carry each way at most."""
        generation = self._number("nvmlDeviceGetMaxPcieLinkGeneration")
        width = self._number("nvmlDeviceGetMaxPcieLinkWidth")
        return _LANES[generation] * width if generation in _LANES and width else _FASTEST

    def read(self) -> PcieBytes:
        """Read both counters at once; takes less than a millisecond."""
        values = (_FieldValue * 2)(_FieldValue(_RECEIVED), _FieldValue(_SENT))
        self._call("nvmlDeviceGetFieldValues", self._device, 2, values)
        for value in values:
            if value.code:
                raise NotCounted(
                    "the driver does not count PCIe's bytes, as those from release 555 on do: "
                    f"{self._text(value.code)}"
                )
        return PcieBytes(values[0].value, values[1].value)


def main() -> int:
    """Sample the counters until the reading process ends."""
    try:
        counters = PcieCounters(sys.argv[1])
        _tell(counters.fastest)
        while not select.select([sys.stdin], [], [], _INTERVAL)[0]:
            began = time.monotonic()
            received, sent = counters.read()
            _tell(began, time.monotonic(), received, sent)
    except NotCounted as error:
        _tell("-", str(error), error.unmetered)
        return 1
    except BrokenPipeError:
        return 1
    return 0


def _tell(*values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
