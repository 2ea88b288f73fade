"""Puts a response's tensors in their final places: the client's memory, or the output memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpubridge.errors import BridgeError, ErrorCode
from gpubridge.host_shm import Slot
from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.output_form import OutputForm
from gpubridge.pb_utils.tensor import OutputTensor
from gpubridge.stub.client_memory import ClientMemory, Target, target_of, targets_of
from gpubridge.stub.outputs import OutputMemory
from gpubridge.tensor.dtypes import element_count
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.records import Record

if TYPE_CHECKING:
    from gpubridge.stub.device.placement import DevicePlacement, Placed

_NOWHERE = (0, 0, 0, NO_LEASE)


class Placement:
    """Knows where outputs go that do not simply go to a new slot each time.

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
        """Make a tensor where this output of a request is wanted, or will be sent from."""
        if self._outputs.foreign:
            return Tensor(name, np.empty(shape, dtype))
        nbytes = dtype.itemsize * element_count(shape)
        target = target_of(record, name)
        place: object = target
        if target is not None and 0 < nbytes <= target.nbytes and not self._is_on_device(target):
            memory = np.frombuffer(self.clients.memory(target)[:nbytes], np.uint8)
        else:
            place, memory = self._outputs.lend_to_model(nbytes, record.context.outputs_for)
        return OutputTensor._placed(name, datatype, memory.view(dtype).reshape(shape), place)

    def _is_on_device(self, target: Target) -> bool:
        return self._device is not None and self._device.reaches(target)

    def allocate_on_device(self, record: Record, form: OutputForm) -> Tensor:
        """Make a tensor on the stub's GPU: in the client's memory if wanted there, or the arena."""
        target = target_of(record, form.name)
        if self._device is not None and target is not None and 0 < form.nbytes <= target.nbytes:
            tensor = self._device.in_client_memory(form, target)
            if tensor is not None:
                return tensor
        # Stubs without a device need not load it.
        from gpubridge.pb_utils.device_tensor import DeviceTensor  # noqa: PLC0415

        return DeviceTensor._empty(form)

    def place(self, record: Record, tensors: Sequence[Tensor]) -> Placed:
        """Put each tensor in its place; one in the client's memory has a reference of no bytes.

        Raises BridgeError: INTERNAL, in Triton's words, when the client has left too little room.
        """
        targets = targets_of(record)
        copies = targets_of(record, "also")
        if self._device is not None:
            for tensor in tensors:
                data = tensor._device_bytes or tensor._payload()
                _check_room(tensor, data, targets.get(tensor._name) or copies.get(tensor._name))
            return self._device.place(record, tensors, targets, copies)
        payloads = [tensor._payload() for tensor in tensors]
        for tensor, payload in zip(tensors, payloads):
            _check_room(tensor, payload, targets.get(tensor._name) or copies.get(tensor._name))
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
                refs[index] = _NOWHERE
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
            # What was copied may have been zeros.
            self._outputs.recall({*fields[3::4]} - {NO_LEASE})
            try:
                raise loss
            finally:
                # Else the error's own frame holds it, and what the request's inputs lie in.
                del loss
        return fields

    def _write(self, tensor: Tensor, payload: Any, target: Target) -> None:
        if isinstance(tensor, OutputTensor) and tensor._final == target:
            return
        if payload.nbytes:
            self._outputs.copy(self.clients.memory(target), payload)


def _check_room(tensor: Tensor, payload: Any, target: Target | None) -> None:
    if target is not None and payload.nbytes > target.nbytes:
        raise BridgeError(
            f"shared memory size specified with the request for output '{tensor._name}' "
            f"({target.nbytes} bytes) should be at least {payload.nbytes} bytes to hold the "
            "results",
            ErrorCode.INTERNAL,
        )
