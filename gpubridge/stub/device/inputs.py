"""Inputs of a model on a GPU, placed where the model wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import numpy as np

from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.tensor import DeviceTensor
from gpubridge.stub.device.memory import StubDevice
from gpubridge.tensor.device_bytes import DeviceBytes, Ready
from gpubridge.transport.records import Record


def received_on_device(
    device: StubDevice, tensors: Sequence[Tensor], record: Record
) -> list[Tensor]:
    """Return received tensors, those on the device as device tensors, under the same leases."""
    refs = record.refs
    if all(device.regions.get(ref[0]) is None for ref in refs):
        return list(tensors)
    waits = device.events.awaited(record.context, len(refs))
    return [_received(device, *each) for each in zip(tensors, refs, waits)]


def _received(
    device: StubDevice, tensor: Tensor, ref: tuple[int, int, int, int], ready: Ready | None
) -> Tensor:
    assert tensor._source is not None
    data = device.borrowed(ref, tensor._source, ready)
    if data is None:
        return tensor
    return DeviceTensor._on_device(
        tensor._name, tensor._datatype, tensor._shape, data, tensor._place
    )


class DeviceInputs:
    """Places inputs by ``placement``: at their ``source``, on the ``device`` or on the ``host``."""

    def __init__(self, device: StubDevice, placement: str, fall_back: Callable[..., None]) -> None:
        self.device = device
        self._placement = placement
        self._fall_back = fall_back
        self._reported = False

    def has(self, region: int) -> bool:
        """Return whether a region is on the device."""
        return self.device.regions.get(region) is not None

    def placed(self, inputs: Sequence[Tensor], record: Record, *, private: bool) -> list[Tensor]:
        """Return a request's inputs in their places; the model may write to ``private`` ones."""
        tensors = received_on_device(self.device, inputs, record)
        if self._placement == "host":
            return self._on_host(tensors)
        if private:
            tensors = self._private(tensors)
        if self._placement == "device":
            tensors = self._uploaded(tensors)
        return tensors

    def take(self, ticket: int, /) -> list[Tensor] | None:
        """Return a request's inputs that were prefetched; None if they were not."""
        del ticket  # Only `InputPrefetcher` prefetches.
        return None

    def _on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in host memory, with one wait for all."""
        brought = []
        copies = []
        for tensor in tensors:
            data = tensor._device_bytes
            if data is None:
                brought.append(tensor)
                continue
            memory = np.empty(data.nbytes, np.uint8).data
            if data.nbytes:
                copies.append((data, memory))
            brought.append(Tensor._received(tensor._name, tensor._datatype, tensor._shape, memory))
        if copies:
            self.device.copy_all_to_host(copies)
        return brought

    def _private(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors, of which those on the device are copies that may not be complete yet."""
        shared = [tensor._device_bytes for tensor in tensors]
        copies = iter(
            self.device.copies_on_device([data for data in shared if data and data.nbytes])
        )
        return [
            _moved(tensor, next(copies)) if data and data.nbytes else tensor
            for tensor, data in zip(tensors, shared)
        ]

    def _uploaded(self, tensors: Sequence[Tensor], *, wait: bool = True) -> list[Tensor]:
        """Return tensors on the device, whose uploads may not be complete yet."""
        placed = []
        copies = []
        for tensor in tensors:
            memory = tensor._source
            if memory is None or tensor._datatype == "BYTES":
                placed.append(tensor)
            elif not memory.nbytes:
                # On the device like the others: frameworks do not mix devices.
                placed.append(_moved(tensor, DeviceBytes(0, 0, self.device.ordinal)))
            elif memory.nbytes > self.device.capacity:
                self._report_too_large(tensor, memory.nbytes)
                placed.append(tensor)
            else:
                data = self.device.allocate_device(memory.nbytes, wait=wait)
                copies.append((memory, data))
                placed.append(_moved(tensor, data))
        if copies:
            self.device.uploads.begin(copies)
        return placed

    def _report_too_large(self, tensor: Tensor, nbytes: int) -> None:
        if self._reported:
            return
        self._reported = True
        self._fall_back(
            "device_input_on_host",
            f"input '{tensor._name}' of {nbytes} bytes stays in host memory: the device arena has "
            f"{self.device.capacity}; raise --backend-config=python,device-arena-bytes=N",
        )


def _moved(tensor: Tensor, data: DeviceBytes) -> Tensor:
    return DeviceTensor._on_device(tensor._name, tensor._datatype, tensor._shape, data)
