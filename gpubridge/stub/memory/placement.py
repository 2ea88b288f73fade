"""Places a response's tensors in the client's memory or in the output memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Slot
from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.datatypes import OutputForm
from gpubridge.pb_utils.tensor import DeviceTensor, OutputTensor
from gpubridge.stub.memory.client_memory import ClientMemory, Target, target_of, targets_of
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor.datatypes import element_count
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.stub.device.placement import DevicePlacement, Placed

_NO_BYTES = (0, 0, 0, NO_LEASE)


class Placement:
    """Places outputs whose memory the client or the model chose.

    - ``on_device``: whether outputs may be on a GPU.
    - ``clients``: the clients' memory.
    """

    def __init__(
        self, outputs: OutputMemory, clients: ClientMemory, device: DevicePlacement | None
    ) -> None:
        self._outputs = outputs
        self.clients = clients
        self._device = device
        self.on_device = device is not None

    def allocate(
        self, record: Record, name: str, datatype: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Tensor:
        """Make an output tensor in the client's target, or in the output memory."""
        if self._outputs.forked:
            return Tensor(name, np.empty(shape, dtype))
        nbytes = dtype.itemsize * element_count(shape)
        target = target_of(record, name)
        place: object = target
        if target is not None and 0 < nbytes <= target.nbytes and not self._is_on_device(target):
            memory = np.frombuffer(self.clients.memory(target)[:nbytes], np.uint8)
        else:
            place, memory = self._outputs.allocate_for_model(nbytes, record.context.outputs_for)
        return OutputTensor._placed(name, datatype, memory.view(dtype).reshape(shape), place)

    def _is_on_device(self, target: Target) -> bool:
        return self._device is not None and self._device.reaches(target)

    def allocate_on_device(self, record: Record, form: OutputForm) -> Tensor:
        """Make an output tensor on the stub's GPU: in the client's target, or in the arena."""
        target = target_of(record, form.name)
        if self._device is not None and target is not None and 0 < form.nbytes <= target.nbytes:
            tensor = self._device.in_client_memory(form, target)
            if tensor is not None:
                return tensor
        return DeviceTensor._empty(form)

    def place(self, record: Record, tensors: Sequence[Tensor]) -> Placed:
        """Place each tensor; one in client memory gets an empty reference.

        Raises BridgeError: INTERNAL, in Triton's words, if the client's target is too small.
        """
        targets = targets_of(record)
        copies = targets_of(record, "also")
        if self._device is not None:
            for tensor in tensors:
                data = tensor._device_bytes or tensor._payload()
                _check_size(tensor, data, targets.get(tensor._name) or copies.get(tensor._name))
            return self._device.place(record, tensors, targets, copies)
        payloads = [tensor._payload() for tensor in tensors]
        for tensor, payload in zip(tensors, payloads):
            _check_size(tensor, payload, targets.get(tensor._name) or copies.get(tensor._name))
        return self._placed(record, tensors, payloads, targets, copies), None

    def _placed(
        self,
        record: Record,
        tensors: Sequence[Tensor],
        payloads: Sequence[Any],
        targets: Mapping[str, Target],
        copies: Mapping[str, Target],
    ) -> list[int]:
        for tensor, payload in zip(tensors, payloads):
            if tensor._name in copies:
                self._write(tensor, payload, copies[tensor._name])
        refs: list[Any] = [None] * len(tensors)
        others = []
        for index, tensor in enumerate(tensors):
            target = targets.get(tensor._name)
            if target is not None:
                self._write(tensor, payloads[index], target)
                refs[index] = _NO_BYTES
            elif isinstance(tensor, OutputTensor) and isinstance(tensor._final, Slot):
                refs[index] = self._outputs.send(tensor._final, payloads[index].nbytes)
            if refs[index] is None:
                others.append(index)
        if others:
            fields = self._outputs.place(
                [payloads[index] for index in others], record.context.outputs_for
            )
            for number, index in enumerate(others):
                refs[index] = fields[4 * number : 4 * number + 4]
        fields = [field for ref in refs for field in ref]
        loss = self.clients.loss(record)
        if loss is not None:
            # The copied bytes may have been zeros.
            self._outputs.recall({*fields[3::4]} - {NO_LEASE})
            try:
                raise loss
            finally:
                # Otherwise the error's own frame keeps it, and so the memory of the inputs.
                del loss
        return fields

    def _write(self, tensor: Tensor, payload: Any, target: Target) -> None:
        if isinstance(tensor, OutputTensor) and tensor._final == target:
            return
        if payload.nbytes:
            self._outputs.copy(self.clients.memory(target), payload)


def _check_size(tensor: Tensor, payload: Any, target: Target | None) -> None:
    if target is not None and payload.nbytes > target.nbytes:
        raise BridgeError(
            f"shared memory size specified with the request for output '{tensor._name}' "
            f"({target.nbytes} bytes) should be at least {payload.nbytes} bytes to hold the "
            "results",
            ErrorCode.INTERNAL,
        )
