"""Staging: copies tensors of requests that lie on another GPU than their model, and counts the copies.

Tensors are copied from GPU to GPU where the driver supports that, else to host memory. The server
copies, as the sender does not know where the model runs, and the model's process cannot access the
memory. Copies between GPUs run on the driver thread, others on threads of their own (`HostCopies`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gpubridge.cuda_ipc import LONGEST_EVENT_SECONDS, Part, late_event
from gpubridge.engine.devices.copies import NoPeerCopy
from gpubridge.engine.devices.edge_events import EdgeEvent, awaited_by
from gpubridge.engine.devices.manager import DeviceManager
from gpubridge.engine.memory.device_region import ON_DEVICE, ClientDeviceSegment
from gpubridge.engine.memory.placed_response import SharedSlot
from gpubridge.engine.workers import TaskSet
from gpubridge.errors import BridgeError, ErrorCode, StubDied, unavailable
from gpubridge.host_shm import HostArena
from gpubridge.request import NO_BYTES, InferRequest, InferResponse, MemoryRange
from gpubridge.telemetry.logs import request_error
from gpubridge.telemetry.statistics import DeviceWork, ModelStatistics

_logger = logging.getLogger(__name__)
_ALIGNMENT = 64
_NO_BYTES = memoryview(b"")
_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.01


class DeviceStaging:
    """Copies inputs of a model's requests to its GPU or the host, and outputs to clients' GPUs.

    - ``arena``: the memory for inputs that are copied to the host.
    - ``statistics``: the model's statistics: copies, and fallbacks from GPU-to-GPU copies.

    Attribute ``finished``: waits until no request is being staged.
    """

    def __init__(
        self, devices: DeviceManager, arena: HostArena, statistics: ModelStatistics
    ) -> None:
        self._devices = devices
        self._arena = arena
        self._work = statistics.device_work
        self._statistics = statistics
        self._tasks = TaskSet()
        self.finished = self._tasks.finished

    @property
    def possible(self) -> bool:
        """Return whether any tensor may be on a GPU."""
        return self._devices.used

    def needed(self, request: InferRequest, device: str | None) -> bool:
        """Return whether tensors of a request lie on another GPU than ``device``, the model's."""
        segments = [part.segment for part in request.ranges or ()]
        if request.client is not None:
            segments += request.client.segments
        return any(isinstance(s, ON_DEVICE) and s.uuid != device for s in segments)

    def begin(
        self, request: InferRequest, device: str | None, submit: Callable[[InferRequest], None]
    ) -> None:
        """Copy a request's inputs, then submit it, or fail it if that is impossible."""
        self._tasks.start(self._stage(request, device, submit))

    async def _stage(
        self, request: InferRequest, device: str | None, submit: Callable[[InferRequest], None]
    ) -> None:
        try:
            await self._stage_inputs(request, device)
            self._stage_outputs(request, device)
        except BridgeError as error:
            # The frames of its traceback refer to the memory.
            error.__traceback__ = None
            if request.slot is not None:
                self._arena.free(request.slot)
                request.slot = None
            request.ranges = request.client = None
            request.finish(error)
            return
        submit(request)

    # -- inputs --------------------------------------------------------------------------------

    async def _stage_inputs(self, request: InferRequest, device: str | None) -> None:
        ranges = list(request.ranges or ())
        far = [i for i, part in enumerate(ranges) if _is_far(part.segment, device)]
        for i in far:
            if not ranges[i].nbytes:
                ranges[i] = NO_BYTES
        request.ranges = ranges
        far = [i for i in far if ranges[i].nbytes]
        if not far:
            return
        parts = [ranges[i] for i in far]
        for event in awaited_by(parts):
            await self._wait_for_event(event)
        kind = "p2p"
        copied = None if device is None else await self._by_peer_copy(parts, device)
        if copied is None:
            kind, copied = "d2h", await self._to_host(parts)
        for i, part in zip(far, copied, strict=True):
            self._work.copied(kind, part.nbytes)
            ranges[i] = part
        request.ranges = ranges
        client = request.context.client
        if client is not None:
            inside = sorted(set(client["in"]).difference(far))
            request.context = request.context.changed(client={**client, "in": inside})

    async def _by_peer_copy(
        self, parts: Sequence[MemoryRange], device: str
    ) -> list[MemoryRange] | None:
        """Copy from GPU to GPU; count a fallback and return None if that is impossible."""
        try:
            return await self._devices.run(partial(self._devices.peers.copy_to, parts, device))
        except NoPeerCopy as error:
            if error.reason not in self._statistics.fallbacks:
                _logger.warning(
                    "tensors of model '%s' are copied between GPUs through host memory: %s",
                    self._statistics.labels["model"],
                    error.message,
                )
            self._statistics.fallbacks[error.reason] += 1
            return None

    async def _to_host(self, parts: Sequence[MemoryRange]) -> list[MemoryRange]:
        total = sum(-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)
        slot = self._arena.allocate(total)
        held = SharedSlot(self._arena.free, slot)
        at = 0
        copied = []
        copies: dict[str, list[Part]] = {}
        for segment, offset, nbytes, _ in parts:
            place = segment.pointer + offset, slot.memory[at : at + nbytes]
            copies.setdefault(segment.uuid, []).append(place)
            copied.append(MemoryRange(slot.segment, slot.offset + at, nbytes, held))
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        for uuid, places in copies.items():
            await self._devices.copies.to_host(uuid, places, (parts, held))
        return copied

    async def _wait_for_event(self, event: EdgeEvent) -> None:
        """Wait for an event without blocking a thread: GPU work may take long.

        Not only the driver is asked: it may not report an event whose recorder is gone. Raises
        BridgeError for lost data, and UNAVAILABLE after `LONGEST_EVENT_SECONDS`.
        """
        events, pause = event.arena.events, _FIRST_PAUSE
        end = time.monotonic() + LONGEST_EVENT_SECONDS
        while (
            events is not None
            and not event.lost
            and not event.over
            and not await self._devices.run(partial(events.done, event.number))
        ):
            if time.monotonic() >= end:
                raise unavailable(late_event(f"stub '{events.instance}'", event.number))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if event.lost:
            raise StubDied(event.lost)

    # -- outputs -------------------------------------------------------------------------------

    def _stage_outputs(self, request: InferRequest, device: str | None) -> None:
        """Receive outputs that the client wants on another GPU here, to copy them there."""
        client, said = request.client, request.context.client
        if client is None or said is None:
            return
        far = {s.region: s for s in client.segments if _is_far(s, device)}
        places = said.get("out", {})
        taken = {name: place for name, place in places.items() if place[0] in far}
        if not taken:
            return
        left = {name: place for name, place in places.items() if name not in taken}
        request.context = request.context.changed(client={**said, "out": left})
        delivery = _Delivery(self._devices, self._work, far, taken, client)
        request.on_done = partial(delivery.pass_on, request.on_done)
        if request.on_partial is not None:
            request.on_partial = partial(delivery.pass_on, request.on_partial)


class _Delivery:
    """Copies outputs of one request to its client's memory, and delivers the responses in order."""

    def __init__(
        self,
        devices: DeviceManager,
        work: DeviceWork,
        segments: dict[int, ClientDeviceSegment],
        places: dict[str, Any],
        client: object,
    ) -> None:
        self._devices = devices
        self._work = work
        self._segments = segments
        self._places = places
        # This reference keeps the client from unregistering the memory.
        self._client = client
        self._last: asyncio.Task[None] | None = None

    def pass_on(self, to: Callable[[Any], None] | None, outcome: Any) -> None:
        """Deliver a response, an error, or the end."""
        before = self._last
        self._last = asyncio.get_running_loop().create_task(self._deliver(before, to, outcome))

    async def _deliver(
        self,
        before: asyncio.Task[None] | None,
        to: Callable[[Any], None] | None,
        outcome: Any,
    ) -> None:
        if isinstance(outcome, InferResponse):
            try:
                await self._write(outcome)
            except Exception as error:  # noqa: BLE001  (a bug of ours is an error of the request's)
                # The frames of its traceback refer to the memory.
                outcome = request_error(error).with_traceback(None)
        if before is not None:
            await before
        if to is not None:
            to(outcome)

    async def _write(self, response: InferResponse) -> None:
        copies: dict[str, list[Part]] = {}
        buffers = list(response.buffers)
        for index, spec in enumerate(response.signature.tensors):
            if spec.name not in self._places:
                continue
            region, offset, size = self._places[spec.name]
            buffer = buffers[index]
            if len(buffer) > size:
                raise BridgeError(
                    f"shared memory size specified with the request for output '{spec.name}' "
                    f"({size} bytes) should be at least {len(buffer)} bytes to hold the results",
                    ErrorCode.INTERNAL,
                )
            segment = self._segments[region]
            copies.setdefault(segment.uuid, []).append((segment.pointer + offset, buffer))
            buffers[index] = _NO_BYTES
        response.buffers = buffers
        for uuid, parts in copies.items():
            await self._devices.copies.to_device(uuid, parts, self._client)
            for _, buffer in parts:
                self._work.copied("h2d", len(buffer))


def _is_far(segment: object, device: str | None) -> bool:
    return isinstance(segment, ON_DEVICE) and segment.uuid != device
