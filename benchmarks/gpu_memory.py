"""The device that is measured, and the limits of its copies."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable
from functools import partial

from gpubridge.bench.device_requests import ClientMemory
from gpubridge.bench.measurement import time_each
from gpubridge.cuda_ipc import DeviceInfo, PinnedMemory, driver_release, probe_devices
from gpubridge.errors import BridgeError

__all__ = ["first_device", "measure_limits"]

_ROUNDS = 5
_LEAST_SECONDS = 0.02

Limits = dict[str, dict[int, float]]
"""Microseconds of a copy by its kind and size."""


def first_device() -> tuple[DeviceInfo, str]:
    """Return the device that is measured and the driver's CUDA release.

    Raises
    ------
    BridgeError
        There is none.
    """
    probe = probe_devices()
    if not probe.count:
        raise BridgeError(f"no GPU can be used: {probe.reason}")
    return probe.devices[0], driver_release()


def measure_limits(device: DeviceInfo, sizes: tuple[int, ...], seconds: float) -> Limits:
    """Return the times of the bare copies that a request needs."""
    limits: Limits = {"d2d": {}, "h2d": {}, "d2h": {}}
    largest = max(sizes)
    with ClientMemory(device, largest) as memory, mmap.mmap(-1, largest) as mapped:
        stream, host = memory.stream, memoryview(mapped)
        pinned = PinnedMemory(memory.context)
        try:
            # Without pinning, the bridge's copies are no faster either.
            pinned.pin(host)
            source, target = memory.source.pointer, memory.target.pointer
            for nbytes in sizes:
                copies = {
                    "d2d": partial(stream.d2d, target, source, nbytes),
                    "h2d": partial(stream.h2d, target, host, nbytes),
                    "d2h": partial(stream.d2h, host, source, nbytes),
                }
                for kind, copy in copies.items():
                    limits[kind][nbytes] = _timed(copy, stream.wait, seconds)
        finally:
            pinned.close()
            host.release()
    return limits


def _timed(copy: Callable[[], None], wait: Callable[[], None], seconds: float) -> float:
    """Return the median of microseconds of a copy and the wait for it: the minimum of a request."""

    def copy_and_wait() -> None:
        copy()
        wait()

    copy_and_wait()
    least = min(seconds, _LEAST_SECONDS * 5)
    samples = time_each(copy_and_wait, lambda done, passed: done >= _ROUNDS and passed >= least)
    return statistics.median(samples) * 1e6
