"""Whether there is a usable GPU: absence is a value with a reason.

Only the driver is asked, through ``cuda.bindings.driver``, which is imported here and when called,
never by importing the package. Counting devices creates no context.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceProbe", "probe_devices"]


@dataclass(frozen=True)
class DeviceProbe:
    """What was found.

    Attributes
    ----------
    count : int
        GPUs that can be used.
    reason : str
        Why there are none; empty when there are.
    """

    count: int
    reason: str


def probe_devices() -> DeviceProbe:
    """Count the GPUs of this process (``CUDA_VISIBLE_DEVICES`` holds)."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415  (loads libcuda: only when asked)
    except ImportError as error:
        return DeviceProbe(
            0, f"cuda-python cannot be imported ({error}): pip install 'gpubridge[gpu]'"
        )
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:
        return DeviceProbe(0, f"no CUDA driver: {error}")
    if code != driver.CUresult.CUDA_SUCCESS:
        return DeviceProbe(0, f"cuInit failed: {code.name} ({int(code)})")
    code, count = driver.cuDeviceGetCount()
    if code != driver.CUresult.CUDA_SUCCESS:
        return DeviceProbe(0, f"cuDeviceGetCount failed: {code.name} ({int(code)})")
    return DeviceProbe(count, "" if count else "the driver reports no device")
