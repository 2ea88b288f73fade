"""Puts a response's tensors in their places where some of them, or the places, are on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from gpubridge.cuda_ipc import EventLease
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Slot
from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.device_tensor import DeviceTensor
from gpubridge.pb_utils.output_form import OutputForm
from gpubridge.pb_utils.tensor import OutputTensor
from gpubridge.stub.client_memory import ClientMemory, Target
from gpubridge.stub.device.memory import StubDevice
from gpubridge.stub.device.transfers import Transfers
from gpubridge.stub.outputs import OutputMemory
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.records import Record

Placed = tuple[list[int], Optional[tuple[int, int]]]
"""The fields of references, and the event that those of them wait for which are on a GPU."""

_NOWHERE = (0, 0, 0, NO_LEASE)


class DevicePlacement:
    """Places tensors with at most one wait for the device: when all that can be begun has been."""

    __slots__ = ("_clients", "_device", "_outputs")

    def __init__(self, outputs: OutputMemory, device: StubDevice, clients: ClientMemory) -> None:
        self._outputs = outputs
        self._device = device
        self._clients = clients

    def reaches(self, target: Target) -> bool:
        """Return whether a client's memory is on the GPU."""
        return self._device.regions.get(target.region) is not None

    def in_client_memory(self, form: OutputForm, target: Target) -> Tensor | None:
        """Make a tensor in a client's memory; None if that is not on the GPU."""
        opened = self._device.regions.get(target.region)
        if opened is None:
            return None
        hold = self._device.hold(opened)
        data = DeviceBytes(
            opened.pointer + target.offset,
            form.nbytes,
            self._device.ordinal,
            hold,
            streams=hold.streams,
        )
        return DeviceTensor._on_device(form.name, form.datatype, form.shape, data, final=target)

    def place(
        self,
        record: Record,
        tensors: Sequence[Tensor],
        targets: Mapping[str, Target],
        copies: Mapping[str, Target],
    ) -> Placed:
        """Put each tensor in its place; BridgeError where there is no room, or the device fails."""
        job = _Job(self._outputs, self._device, record.context.outputs_for)
        try:
            for tensor in tensors:
                self._begin(job, tensor, targets, copies, record.context)
            return job.finish()
        except BaseException as error:
            self._device.note(error)
            job.abandon()
            raise

    def references(self, tensors: Sequence[Tensor], model: str) -> Placed:
        """Place the inputs of a call of ``model`` that lie in no memory that can be handed on.

        Where there is an event, what was handed on waits for it, too, and else for whatever it has
        waited for here.
        """
        job = _Job(self._outputs, self._device, model)
        try:
            for tensor in tensors:
                if tensor._place is not None and tensor._place[2]:
                    job.refer(tensor._place)
                    job.follow(tensor._device_bytes)
                else:
                    self._pass_on(job, tensor, on_device=self._device.shared)
            return job.finish()
        except BaseException as error:
            self._device.note(error)
            job.abandon()
            raise

    def _begin(
        self,
        job: _Job,
        tensor: Tensor,
        targets: Mapping[str, Target],
        copies: Mapping[str, Target],
        context: RequestContext,
    ) -> None:
        name = tensor._name
        copy = copies.get(name)
        if copy is not None:
            self._write(job, tensor, copy)
        target = targets.get(name)
        if target is None:
            stays = self._device.shared and _wants(context, name) == self._device.uuid
            self._pass_on(job, tensor, on_device=stays)
            return
        self._write(job, tensor, target)
        job.refer(_NOWHERE)

    def _pass_on(self, job: _Job, tensor: Tensor, *, on_device: bool) -> None:
        data = tensor._device_bytes
        on_device = on_device and data is not None and self._device.hands_on
        if data is not None and (data.nbytes or on_device):
            if on_device:
                job.keep(data)
            else:
                job.send_from_device(data)
            return
        payload = tensor._payload()
        if isinstance(tensor, OutputTensor) and isinstance(tensor._final, Slot):
            ref = self._outputs.send(tensor._final, payload.nbytes)
            if ref is not None:
                job.refer(ref)
                return
        job.send(payload)

    def _write(self, job: _Job, tensor: Tensor, target: Target) -> None:
        """Write a tensor to a client's memory, unless the model has made it there."""
        opened = self._device.regions.get(target.region)
        data = tensor._device_bytes
        if getattr(tensor, "_final", None) == target:
            if data is not None:
                job.order(data)
            return
        if data is not None:
            if opened is not None:
                job.write(data, opened.pointer + target.offset)
            elif data.nbytes:
                job.fetch(data, self._clients.memory(target)[: data.nbytes])
            return
        payload = tensor._payload()
        if not payload.nbytes:
            return
        if opened is not None:
            memory = np.frombuffer(payload, np.uint8).data
            job.load(memory, opened.pointer + target.offset)
        else:
            self._outputs.copy(self._clients.memory(target), payload)


class _Job:
    """One response on its way: what was begun, and what has to go back if it comes to nothing."""

    def __init__(self, outputs: OutputMemory, device: StubDevice, consumer: str) -> None:
        self._outputs = outputs
        self._device = device
        self._consumer = consumer
        self._refs: list[Any] = []
        # By their places in _refs: what is lent when all is done.
        self._kept: list[tuple[int, object]] = []
        # Whoever gets these waits for them on the device; what was lent to the model, apart.
        self._handed_on: list[DeviceBytes] = []
        self._referred: list[DeviceBytes] = []
        self._slots: list[Slot] = []
        self._begun: Transfers | None = None
        self._leases: list[int] = []
        self._sent: list[tuple[int, Any]] = []
        # What goes to memory that is not pinned, when the streams have passed.
        self._fetched: list[tuple[DeviceBytes, memoryview]] = []
        # Whether something was begun that has to be done before others hear of it.
        self._leaving = False

    def refer(self, ref: Sequence[int]) -> None:
        """Add a reference that is complete."""
        self._refs.append(tuple(ref))

    def follow(self, data: DeviceBytes | None) -> None:
        """Order the model's work on bytes lent to it before the work of others."""
        if data is not None:
            self._referred.append(data)

    def send(self, payload: Any) -> None:
        """Send host memory; all of it is placed in one slot in the end."""
        self._sent.append((len(self._refs), payload))
        self._refs.append(None)

    def send_from_device(self, data: DeviceBytes) -> None:
        """Send bytes of the device by way of host memory."""
        slot = self._outputs.reserve(data.nbytes, self._consumer)
        self._slots.append(slot)
        self.read(data, slot.memory[: data.nbytes])
        self._lend((slot.segment.region, slot.offset, data.nbytes), slot)

    def keep(self, data: DeviceBytes) -> None:
        """Hand on bytes of the device: as they are in the arena, else as a copy there."""
        device = self._device
        if not data.nbytes:
            # There is nothing to lend: the reference only says where the tensor is.
            self.refer((device.own.region, 0, 0, NO_LEASE))
            return
        place = device.place_in_arena(data)
        if place is None and data.nbytes <= device.capacity:
            try:
                data = self._copies.copy(data)
                place = device.place_in_arena(data)
            except BridgeError as error:
                device.note_full(error)
        if place is None or not device.shared:
            # It goes by way of the host: it is too large, there is no room, or the arena has become
            # this process's alone.
            self.send_from_device(data)
            return
        self._handed_on.append(data)
        self._lend((*place, data.nbytes), data)

    def fetch(self, data: DeviceBytes, memory: memoryview) -> None:
        """Copy bytes of the device to memory of a client on the host, which is not pinned."""
        self._leaving = True
        self._fetched.append((data, memory))

    def read(self, data: DeviceBytes, memory: memoryview) -> None:
        """Copy bytes of the device to the host."""
        self._leaving = True
        self._copies.read(data, memory)

    def write(self, data: DeviceBytes, pointer: int) -> None:
        """Copy bytes of the device to memory of a client there."""
        if data.nbytes:
            self._leaving = True
            self._copies.write(data, pointer)

    def load(self, memory: memoryview, pointer: int) -> None:
        """Copy host memory to the device."""
        self._leaving = True
        self._copies.load(memory, pointer)

    def order(self, data: DeviceBytes) -> None:
        """Let the response wait for what the model does with bytes of a client's."""
        self._leaving = True
        self._copies.order(data)

    @property
    def _copies(self) -> Transfers:
        if self._begun is None:
            self._begun = self._device.transfers()
        return self._begun

    def _lend(self, place: tuple[int, int, int], kept: object) -> None:
        self._kept.append((len(self._refs), kept))
        self._refs.append(place)

    def finish(self) -> Placed:
        """Lend what is handed on, once all that leaves the device has; returns as `place`."""
        event = self._complete()
        lent = [kept for _, kept in self._kept]
        self._leases = self._outputs.lend_all(lent if event is None else [*lent, event])
        self._slots.clear()
        for (index, _), lease in zip(self._kept, self._leases):
            self._refs[index] = (*self._refs[index], lease)
        if self._sent:
            fields = self._outputs.place([payload for _, payload in self._sent], self._consumer)
            for number, (index, _) in enumerate(self._sent):
                self._refs[index] = fields[4 * number : 4 * number + 4]
        refs = [field for ref in self._refs for field in ref]
        return refs, None if event is None else (event.number, self._leases[-1])

    def _complete(self) -> EventLease | None:
        """Wait for what leaves the device; else return the event that others have to wait for."""
        pending = [*self._handed_on, *self._referred]
        if self._leaving:
            for data in pending:
                self._copies.order(data)
            self._device.finish(self._copies, self._fetched)
            self._leaving = False
            return None
        event = None
        if any(data.streams or data.ready is not None for data in self._handed_on) or any(
            # It may have been written to.
            data.streams and not data.read_only
            for data in self._referred
        ):
            event = self._device.hand_over(pending, self._copies)
        self._leave()
        return event

    def _leave(self) -> None:
        if self._begun is not None:
            self._begun.leave()

    def abandon(self) -> None:
        """Give everything back; what was begun may still write to it, and is waited for."""
        try:
            if self._leaving:
                self._copies.finish()
            self._leave()
        except BaseException as error:
            # The process will end: its memory must not be used for anything else before.
            self._device.note(error)
            return
        for slot in self._slots:
            self._outputs.give_back(slot)
        self._slots.clear()
        self._outputs.recall(self._leases)
        self._leases = []


def _wants(context: RequestContext, name: str) -> str:
    """Return the device on which who gets an output can take it; empty for none."""
    if context.device_outputs is not None:
        return context.device_outputs.get(name, "")
    return context.device
