"""The bytes that a GPU has sent and received over PCIe, as NVIDIA's management library counts them.

Called by ctypes: the driver brings the library along, and no package is needed.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_SENT, _RECEIVED = 197, 198  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, _RX_BYTES
_VIRTUAL = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU: this system is a guest with a part of a GPU
# Bytes per second of a lane, by the generation of the link.
_LANES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_FASTEST = 16 * _LANES[6]


class NotCounted(Exception):
    """Reason why a GPU's PCIe bytes are not known; ``unmetered`` where nothing else knows them."""

    def __init__(self, reason: str, *, unmetered: bool = False) -> None:
        super().__init__(reason)
        self.unmetered = unmetered


class PcieBytes(NamedTuple):
    """Readings of both counters, which begin again at 0 when they are full."""

    received: int
    sent: int


class _FieldValue(ctypes.Structure):
    """One value of NVML's, ``nvmlFieldValue_t``: 40 bytes."""

    _fields_: ClassVar = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class PcieCounters:
    """The counters of one GPU. Raises NotCounted: the driver, or the device, has none.

    Parameters
    ----------
    device : str
        Its UUID.
    """

    def __init__(self, device: str) -> None:
        if device.startswith("MIG-"):
            reason = "the device is a part of a GPU (MIG), and PCIe is metered for whole GPUs only"
            raise NotCounted(reason, unmetered=True)
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NotCounted(f"{_LIBRARY} cannot be loaded: {error}") from None
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", device.encode(), ctypes.byref(self._device))
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

    def _number(self, function: str) -> int:
        """Return what NVML says of the device; 0 where it does not."""
        number = ctypes.c_uint()
        failed = getattr(self._library, function)(self._device, ctypes.byref(number))
        return 0 if failed else number.value

    def _call(self, function: str, *arguments: object) -> None:
        called = getattr(self._library, function, None)
        if called is None:
            raise NotCounted(f"the driver is too old: {_LIBRARY} has no {function}")
        if code := called(*arguments):
            raise NotCounted(f"{function} failed: {self._text(code)}")

    def _text(self, code: int) -> str:
        return str(self._library.nvmlErrorString(code).decode())
