"""Requests of the GPU benchmark's rows, checked and timed."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.gpu_rows import GpuRow
from gpubridge.bench.device_requests import ClientMemory, DeviceRequests, Way
from gpubridge.bench.measurement import time_each
from gpubridge.errors import BridgeError

__all__ = ["Requests"]

_LEAST = 5
_SMALL = 4  # bytes of a request whose work is between models


class Requests(DeviceRequests):
    """A connection to one server, which has the benchmark's regions registered."""

    def __init__(self, name: str, port: int, memory: ClientMemory) -> None:
        super().__init__(name, port, memory)
        self._server = name

    def check_row(self, row: GpuRow, nbytes: int) -> None:
        """Send a request with new random data into poisoned memory.

        Raises
        ------
        BridgeError
            The answer is not the input, or not the number of tensors.
        """
        if row.way is not None:
            self.check(row.model, row.way, nbytes, answered=row.checked)
            return
        answer = self.infer(row.model, _SMALL, bytes(_SMALL))
        if answer[-_SMALL:] != np.float32(48).tobytes():
            raise BridgeError(f"{self._server}: {row.model}: not all tensors came back on the GPU")

    def time_row(self, row: GpuRow, nbytes: int, seconds: float) -> float:
        """Return the median of microseconds of a request, one after the other."""
        way = Way.NETWORK if row.way is None else row.way
        send = self.prepared(row.model, way, _SMALL if row.way is None else nbytes)
        samples = time_each(send, lambda sent, passed: sent >= _LEAST and passed >= seconds)
        return statistics.median(samples) * 1e6
