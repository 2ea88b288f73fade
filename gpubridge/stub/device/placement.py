"""Places a response's tensors when some of them, or of their places, are on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import numpy as np

from gpubridge.cuda_ipc import EventLease
from gpubridge.errors import BridgeError
from gpubridge.host_shm import Slot
from gpubridge.pb_utils import Tensor
from gpubridge.pb_utils.datatypes import OutputForm
from gpubridge.pb_utils.tensor import DeviceTensor, OutputTensor
from gpubridge.stub.device.memory import StubDevice
from gpubridge.stub.device.transfers import Transfers
from gpubridge.stub.memory.client_memory import ClientMemory, Target
from gpubridge.stub.memory.outputs import OutputMemory
from gpubridge.tensor.device_bytes import DeviceBytes
from gpubridge.transport.context import RequestContext
from gpubridge.transport.control import NO_LEASE
from gpubridge.transport.records import Record

Placed = tuple[list[int], Optional[tuple[int, int]]]
"""The fields of references, and the event that completes those on a GPU."""

_NO_MEMORY = (0, 0, 0, NO_LEASE)


class DevicePlacement:
    """Places tensors with at most one wait for the device, after all copies were started."""

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
        lease = self._device.lease(opened)
        data = DeviceBytes(
            opened.pointer + target.offset,
            form.nbytes,
            self._device.ordinal,
            lease,
            streams=lease.streams,
        )
        return DeviceTensor._on_device(form.name, form.datatype, form.shape, data, final=target)

    def place(
        self,
        record: Record,
        tensors: Sequence[Tensor],
        targets: Mapping[str, Target],
        copies: Mapping[str, Target],
    ) -> Placed:
        """Place each tensor; BridgeError if there is no space, or the device fails."""
        with self._transaction(record.context.outputs_for) as response:
            for tensor in tensors:
                self._begin(response, tensor, targets, copies, record.context)
            return response.finish()

    def references(self, tensors: Sequence[Tensor], model: str) -> Placed:
        """Place the inputs of a call of ``model``; those in shared memory are referred to.

        If there is an event, referred inputs wait for it, too; else for the events that they waited
        for here.
        """
        with self._transaction(model) as response:
            for tensor in tensors:
                if tensor._place is not None and tensor._place[2]:
                    response.refer(tensor._place)
                    response.follow(tensor._device_bytes)
                else:
                    self._send(response, tensor, on_device=self._device.shared)
            return response.finish()

    @contextmanager
    def _transaction(self, consumer: str) -> Iterator[_Response]:
        """Roll back a response that cannot be placed."""
        response = _Response(self._outputs, self._device, consumer)
        try:
            yield response
        except BaseException as error:
            self._device.note_error(error)
            response.roll_back()
            raise

    def _begin(
        self,
        response: _Response,
        tensor: Tensor,
        targets: Mapping[str, Target],
        copies: Mapping[str, Target],
        context: RequestContext,
    ) -> None:
        name = tensor._name
        copy = copies.get(name)
        if copy is not None:
            self._write(response, tensor, copy)
        target = targets.get(name)
        if target is None:
            stays = self._device.shared and _wants(context, name) == self._device.uuid
            self._send(response, tensor, on_device=stays)
            return
        self._write(response, tensor, target)
        response.refer(_NO_MEMORY)

    def _send(self, response: _Response, tensor: Tensor, *, on_device: bool) -> None:
        data = tensor._device_bytes
        on_device = on_device and data is not None and self._device.shares_arena
        if data is not None and (data.nbytes or on_device):
            if on_device:
                response.share(data)
            else:
                response.send_from_device(data)
            return
        payload = tensor._payload()
        if isinstance(tensor, OutputTensor) and isinstance(tensor._final, Slot):
            ref = self._outputs.send(tensor._final, payload.nbytes)
            if ref is not None:
                response.refer(ref)
                return
        response.send(payload)

    def _write(self, response: _Response, tensor: Tensor, target: Target) -> None:
        """Write a tensor to a client's memory, unless the model has made it there."""
        opened = self._device.regions.get(target.region)
        data = tensor._device_bytes
        if getattr(tensor, "_final", None) == target:
            if data is not None:
                response.order(data)
            return
        if data is not None:
            if opened is not None:
                response.write(data, opened.pointer + target.offset)
            elif data.nbytes:
                response.fetch(data, self._clients.memory(target)[: data.nbytes])
            return
        payload = tensor._payload()
        if not payload.nbytes:
            return
        if opened is not None:
            memory = np.frombuffer(payload, np.uint8).data
            response.load(memory, opened.pointer + target.offset)
        else:
            self._outputs.copy(self._clients.memory(target), payload)


class _Response:
    """The placement of one response: started copies, and memory to release if it fails."""

    def __init__(self, outputs: OutputMemory, device: StubDevice, consumer: str) -> None:
        self._outputs = outputs
        self._device = device
        self._consumer = consumer
        self._refs: list[Any] = []
        # Memory to lend in the end, by its index in _refs.
        self._lent: list[tuple[int, object]] = []
        # The consumer's streams wait for these: the model's own bytes, and bytes lent to the model.
        self._shared: list[DeviceBytes] = []
        self._referred: list[DeviceBytes] = []
        self._slots: list[Slot] = []
        self._transfers: Transfers | None = None
        self._leases: list[int] = []
        self._sent: list[tuple[int, Any]] = []
        # Copies to memory that is not pinned, made when the streams have passed.
        self._fetched: list[tuple[DeviceBytes, memoryview]] = []
        # Set by copies that have to be complete before the response is sent.
        self._must_wait = False

    def refer(self, ref: Sequence[int]) -> None:
        """Add a complete reference."""
        self._refs.append(tuple(ref))

    def follow(self, data: DeviceBytes | None) -> None:
        """Order the consumer's work on lent bytes after the model's."""
        if data is not None:
            self._referred.append(data)

    def send(self, payload: Any) -> None:
        """Send host memory; `finish` places all of it in one slot."""
        self._sent.append((len(self._refs), payload))
        self._refs.append(None)

    def send_from_device(self, data: DeviceBytes) -> None:
        """Send bytes of the device through host memory."""
        slot = self._outputs.reserve(data.nbytes, self._consumer)
        self._slots.append(slot)
        self.read(data, slot.memory[: data.nbytes])
        self._lend((slot.segment.region, slot.offset, data.nbytes), slot)

    def share(self, data: DeviceBytes) -> None:
        """Share bytes of the device, copied to the arena if they are elsewhere."""
        device = self._device
        if not data.nbytes:
            # Nothing to lend: the reference only names the device.
            self.refer((device.first_region.region, 0, 0, NO_LEASE))
            return
        place = device.find_in_arena(data)
        if place is None and data.nbytes <= device.capacity:
            try:
                data = self.copies.copy(data)
                place = device.find_in_arena(data)
            except BridgeError as error:
                device.report_full(error)
        if place is None or not device.shared:
            # It is too large, there is no space, or the arena has become private.
            self.send_from_device(data)
            return
        self._shared.append(data)
        self._lend((*place, data.nbytes), data)

    def fetch(self, data: DeviceBytes, memory: memoryview) -> None:
        """Copy bytes of the device to a client's host memory, which is not pinned."""
        self._must_wait = True
        self._fetched.append((data, memory))

    def read(self, data: DeviceBytes, memory: memoryview) -> None:
        """Copy bytes of the device to the host."""
        self._must_wait = True
        self.copies.read(data, memory)

    def write(self, data: DeviceBytes, pointer: int) -> None:
        """Copy bytes of the device to a client's device memory."""
        if data.nbytes:
            self._must_wait = True
            self.copies.write(data, pointer)

    def load(self, memory: memoryview, pointer: int) -> None:
        """Copy host memory to the device."""
        self._must_wait = True
        self.copies.load(memory, pointer)

    def order(self, data: DeviceBytes) -> None:
        """Let the response wait for the model's work on a client's memory."""
        self._must_wait = True
        self.copies.order(data)

    @property
    def copies(self) -> Transfers:
        if self._transfers is None:
            self._transfers = self._device.transfers()
        return self._transfers

    def _lend(self, place: tuple[int, int, int], memory: object) -> None:
        self._lent.append((len(self._refs), memory))
        self._refs.append(place)

    def finish(self) -> Placed:
        """Wait for copies from the device, lend the memory, and return as `DevicePlacement.place`."""
        event = self._complete()
        lent = [memory for _, memory in self._lent]
        self._leases = self._outputs.lend_all(lent if event is None else [*lent, event])
        self._slots.clear()
        for (index, _), lease in zip(self._lent, self._leases):
            self._refs[index] = (*self._refs[index], lease)
        if self._sent:
            fields = self._outputs.place([payload for _, payload in self._sent], self._consumer)
            for number, (index, _) in enumerate(self._sent):
                self._refs[index] = fields[4 * number : 4 * number + 4]
        refs = [field for ref in self._refs for field in ref]
        return refs, None if event is None else (event.number, self._leases[-1])

    def _complete(self) -> EventLease | None:
        """Wait for copies from the device; else return the event that consumers wait for."""
        pending = [*self._shared, *self._referred]
        if self._must_wait:
            for data in pending:
                self.copies.order(data)
            self._device.finish(self.copies, self._fetched)
            self._must_wait = False
            return None
        event = None
        if any(data.streams or data.ready is not None for data in self._shared) or any(
            # The model may have written to it.
            data.streams and not data.read_only
            for data in self._referred
        ):
            event = self._device.record_event(pending, self.copies)
        self._detach()
        return event

    def _detach(self) -> None:
        if self._transfers is not None:
            self._transfers.detach()

    def roll_back(self) -> None:
        """Release all memory, after waiting for started copies."""
        try:
            if self._must_wait:
                self.copies.finish()
            self._detach()
        except BaseException as error:
            # The process will end: its memory must not be reused before.
            self._device.note_error(error)
            return
        for slot in self._slots:
            self._outputs.give_back(slot)
        self._slots.clear()
        self._outputs.recall(self._leases)
        self._leases = []


def _wants(context: RequestContext, name: str) -> str:
    """Return the device on which the consumer of an output takes it; empty for none."""
    if context.device_outputs is not None:
        return context.device_outputs.get(name, "")
    return context.device
